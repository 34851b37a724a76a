// The clients from npm: `node --test`, in a folder that has them; see scripts/clients.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";
import OpenAI from "openai";

const url = process.env.LLMD_URL;
const model = process.env.LLMD_REAL_MODEL;
const ollama = new Ollama({ host: url });
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "anything", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
const parameters = { type: "object", properties: { n: { type: "integer" } }, required: ["n"] };
const tools = [{ type: "function", function: { name: "look", description: "d", parameters } }];
const options = { temperature: 0, num_predict: 20 };

test("ollama lists, shows and pulls", async () => {
  const { models } = await ollama.list();
  assert.ok(models.some((one) => one.name === model));
  assert.equal((await ollama.show({ model })).details.family, "llama");
  const statuses = [];
  for await (const part of await ollama.pull({ model: "new", stream: true })) statuses.push(part.status);
  assert.equal(statuses.at(-1), "success");
  await assert.rejects(ollama.show({ model: "x" }), /model 'x' not found/);
});

test("ollama chats and streams", async () => {
  const answer = await ollama.chat({ model, messages, options });
  assert.match(answer.message.content, /Paris/);
  let text = "";
  let last;
  for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.match(text, /Paris/);
  assert.ok(last.done && last.eval_count > 0);
});

test("ollama gets structured output, tool calls and vectors", async () => {
  const shaped = await ollama.chat({ model, messages, format: parameters });
  assert.equal(typeof JSON.parse(shaped.message.content).n, "number");
  const called = await ollama.chat({ model: "obliging", messages: [{ role: "user", content: "7" }], tools });
  assert.deepEqual(called.message.tool_calls[0].function.arguments, { n: 7 });
  assert.equal((await ollama.embed({ model: "embedder", input: ["a", "b"] })).embeddings.length, 2);
});

test("openai lists, chats and streams", async () => {
  const ids = [];
  for await (const one of await openai.models.list()) ids.push(one.id);
  assert.ok(ids.includes(model));
  const body = { model, messages, temperature: 0, max_tokens: 20 };
  const answer = await openai.chat.completions.create(body);
  assert.match(answer.choices[0].message.content, /Paris/);
  const stream = await openai.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const part of stream) {
    text += part.choices[0]?.delta.content ?? "";
    usage = part.usage ?? usage;
  }
  assert.match(text, /Paris/);
  assert.ok(usage.completion_tokens > 0);
});

test("openai gets structured output, tool calls, vectors and responses", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "n", schema: parameters } };
  const shaped = await openai.chat.completions.create({ model, messages, response_format });
  assert.equal(typeof JSON.parse(shaped.choices[0].message.content).n, "number");
  const called = await openai.chat.completions.create({ model: "obliging", messages: [{ role: "user", content: "7" }], tools, tool_choice: "required" });
  assert.deepEqual(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments), { n: 7 });
  assert.equal((await openai.embeddings.create({ model: "embedder", input: ["a", "b"] })).data.length, 2);
  const response = await openai.responses.create({ model, input: "What is the capital of France? Answer in one sentence.", temperature: 0, max_output_tokens: 20 });
  assert.match(response.output_text, /Paris/);
});

test("openai sees errors as its own classes", async () => {
  await assert.rejects(openai.chat.completions.create({ model: "x", messages }), OpenAI.NotFoundError);
});
