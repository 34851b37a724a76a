"""The messages of the process boundary between the daemon and one worker.

One JSON object per line, in UTF-8. Requests go down the child's stdin, events come up its stdout,
logs go to stderr. Every message is a frozen value with a `type` tag; an unknown tag is a
`ProtocolError` that names it. Unknown fields are ignored, so a message may grow.

    daemon                                   worker
      │  Load ───────────────────────────────▶ │  once, first
      │ ◀─────────────────── Loading, Loading… │  progress; also the sign of life while loading
      │ ◀────────────────────── Ready | Failed │  a Failed without an id ends the worker
      │  Generate, Embed, Tokenize, Cancel ──▶ │  any number, any time after Ready
      │ ◀────────────────────────────── Started│  once per Generate: the prompt as the model sees it
      │ ◀──────────────────────────────── Step │  one line per engine step: deltas of all sequences
      │ ◀────────────── Embedded, Tokenized, … │  answers
      │ ◀─────────────────────────────── Stats │  at least once a second: the sign of life
      │  Shutdown, or the end of stdin ──────▶ │  the worker ends

Every Generate ends with exactly one Delta that carries `finished`, or one Failed with its id; also
after a Cancel. Deltas carry the text *and* the ids it was made of: with `Started.prompt_ids`, the
ids so far and the seed, the daemon can hand an interrupted stream to a fresh worker (`Generate.
output_ids`), which goes on at the exact token.

msgspec structs, not dataclasses: they are frozen values too, and msgspec checks the types of a line
while decoding it, at a tenth of the cost. What comes from JSON is a tree, in no cycle: the
collector need not see it (`gc=False`). Nothing here knows torch, asyncio or a file.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

FINISH_REASONS = ("stop", "length", "abort", "error")


class ProtocolError(Exception):
    """A line is not a message of this protocol. The text says what was wrong with it."""


class Message(msgspec.Struct, frozen=True, gc=False, tag_field="type", omit_defaults=True):
    """Base of all messages; the tag is the class's name."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Defaults are those of the native API's `options`.

    Order: penalties, logit_bias, mask, top_k, typical_p, top_p, min_p, temperature, draw
    (research/ollama-contract.md §3.3). The draw's noise is a hash of (seed, position, token id).
    """

    temperature: float = 0.8  # 0 is exact argmax
    top_k: int = 40  # <= 0 is off
    top_p: float = 0.9  # 1 is off
    min_p: float = 0.0  # 0 is off
    typical_p: float = 1.0  # 1 is off
    repeat_last_n: int = 64  # tokens the penalties look back; 0 is off, -1 the whole context
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: drawn by the worker and reported in Started
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # end-of-generation tokens cannot be drawn before this many
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the chosen token's; k: and those of the k most likely


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model: its name inside the model, what it is for, and where it lies."""

    name: str  # "model.safetensors", "tokenizer.json", "SmolLM2-135M.Q4_1.gguf"
    role: str  # weights, config, tokenizer, chat_template, generation_config, adapter, ...
    path: str  # absolute


class DevicePart(msgspec.Struct, frozen=True):
    """Consecutive layers that live on one device. The embedding goes with the first part, the
    final norm and the head with the last."""

    device: str  # "cpu", "cuda:0"
    num_layers: int  # -1: all that are left
    memory_bytes: int = 0  # budget for weights and KV on this device; 0: not limited


# --------------------------------------------------------------------------- daemon -> worker


class Load(Message, frozen=True):
    """Load this model. Sent once, first."""

    name: str  # for logs and errors
    digest: str  # of the manifest; part of every prefix hash
    files: list[ModelFile]
    context_length: int = 0  # cap in tokens of one sequence; 0: what the model was trained for
    parts: list[DevicePart] = []  # empty: all on the CPU
    dtype: str = "auto"  # auto, bfloat16, float16, float32
    kv_budget_bytes: int = 0  # physical memory the KV cache may reach; 0: the worker chooses
    max_num_seqs: int = 256  # sequences that run at once
    max_batch_tokens: int = 0  # token budget of one step; 0: the worker chooses
    prefill_chunk: int = 0  # cap on one sequence's tokens in one step; 0: off. Used by tests
    num_threads: int = 0  # 0: the physical cores this process may use
    template: str | None = None  # Jinja text that replaces the model's own
    cache_dir: str = ""  # for derived files: merges of the tokenizer, saved prefixes
    prefix_budget_bytes: int = 0  # how much of the prefix cache may be kept there at unload


class Generate(Message, frozen=True):
    """Start one sequence. Exactly one of `messages`, `prompt` and `token_ids` is the input."""

    id: str
    messages: list[dict[str, Any]] | None = None  # rendered by the chat template
    prompt: str | None = None  # used as it stands; special tokens in it are recognised
    token_ids: list[int] | None = None  # used as they stand
    tools: list[dict[str, Any]] = []
    must_call: bool = False  # the answer is a call of one of the tools, and nothing else
    template: str | None = None  # Jinja text for this request alone
    template_kwargs: dict[str, Any] = {}
    suffix: str | None = None  # fill-in-the-middle, with `prompt`
    context_ids: list[int] = []  # an earlier exchange, put before the prompt
    add_bos: bool = True  # with `prompt`; never doubled
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None  # None: up to the end of the context
    num_ctx: int | None = None  # this request's cap in tokens; never above the loaded one
    num_keep: int = 4
    stop: list[str] = []
    stop_token_ids: list[int] = []
    truncate: bool = True  # an over-long prompt may be shortened; False: Failed("too_long")
    shift: bool = True  # at the end of the window, drop the oldest half and go on
    think: bool | str | None = None  # None: as the model's template has it
    format: Any = None  # None, "json", a JSON schema object, {"regex": ...} or {"grammar": ...}
    output_ids: list[int] = []  # generated before by another worker; see Delta
    parse: bool = True  # split thinking and tool calls from the text; False: text as it is
    priority: int = 0  # lower runs first
    client: str = ""  # fairness key
    cache_salt: str = ""  # prefixes are shared only between equal salts
    adapter: str = ""
    render_only: bool = False  # answer Started with `rendered`, then finish; nothing is run


class Embed(Message, frozen=True):
    """Embed these texts. Answered by Embedded or Failed."""

    id: str
    texts: list[str]
    truncate: bool = True
    dimensions: int = 0  # 0: all
    num_ctx: int | None = None


class Tokenize(Message, frozen=True):
    """Text or messages to ids, and ids to text. Answered by Tokenized or Failed."""

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    token_ids: list[int] | None = None
    add_bos: bool = True


class Cancel(Message, frozen=True):
    """End this sequence now. It still ends with one final Delta, reason "abort". Idempotent."""

    id: str


class SetKVBudget(Message, frozen=True):
    """The broker's grant: the physical KV memory may be at most this. Answered by Stats."""

    budget_bytes: int


class Shutdown(Message, frozen=True):
    """End after `drain_s` seconds at most; what still runs then finishes with reason "abort"."""

    drain_s: float = 0.0


# --------------------------------------------------------------------------- worker -> daemon


class Loading(Message, frozen=True):
    """Progress of Load."""

    fraction: float  # 0..1, never decreases
    stage: str = ""  # "reading weights", "packing", "warming up"


class Ready(Message, frozen=True):
    """The model can serve. Sizes are what was really allocated, in bytes."""

    context_length: int  # tokens one sequence may hold
    trained_context_length: int
    block_size: int
    num_blocks: int  # what the KV budget allows
    block_bytes: int
    weights_bytes: int
    weights_vram_bytes: int = 0  # the part of weights_bytes on GPUs
    block_groups: int = 1  # blocks that one stretch of `block_size` tokens takes, one of each group
    dtype: str = ""
    capabilities: list[str] = []  # completion, tools, thinking, insert, embedding
    vocab_size: int = 0
    details: dict[str, Any] = {}  # for `show --verbose` and the log: kernels, formats, threads


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Natural log of the softmax over the unmodified logits."""

    token_id: int
    token: str  # may be a part of a character; `bytes` is exact
    logprob: float
    bytes: list[int] = []
    top: list[TokenLogprob] = []


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One complete call."""

    id: str  # "call_" and 8 of [a-z0-9]
    name: str
    arguments: dict[str, Any]


class Finished(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Why and with what figures a sequence ended. Durations in seconds."""

    reason: str  # one of FINISH_REASONS
    stop_reason: str | int | None = None  # the stop string, or the stop token's id
    num_prompt_tokens: int = 0  # the cached ones included
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0  # from arrival to the first step
    prefill_s: float = 0.0  # from the first step to the end of the prompt
    decode_s: float = 0.0  # from there to the last token; never 0 if one was drawn
    error: str = ""  # with reason "error"


class Delta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one step added to one sequence. Text holds whole code points only.

    `token_ids` are the ids *released* with this text: decode(all ids so far) starts with all text
    so far, and is equal to it at the end. Ids held back (half a character, half a stop string) come
    with the delta that releases their text; the final delta brings the rest.

    A resumed sequence (`Generate.output_ids`) is told from its first token: its first delta carries
    the text of `output_ids` again, and the receiver drops as much as it already passed on. What was
    held back where the old worker died is thus neither lost nor doubled.
    """

    id: str
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: list[int] = []
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: Finished | None = None


def merged(first: Delta, second: Delta) -> Delta:
    """Two deltas of one sequence, one after the other, as one."""
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        thinking=first.thinking + second.thinking,
        tool_calls=first.tool_calls + second.tool_calls,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
    )


class Stats(Message, frozen=True):
    """The worker's own view of itself. Counters only grow."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0  # allowed by the budget
    blocks_in_use: int = 0  # referenced by a sequence
    blocks_cached: int = 0  # unreferenced, a known prefix
    blocks_free: int = 0  # unreferenced, blank
    kv_bytes: int = 0  # physically committed
    steps: int = 0
    prompt_tokens: int = 0  # computed, the cached ones not included
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    blocks_left_behind: int = 0  # given back because the window of a layer had passed them
    tokens_per_s: float = 0.0  # output, over the last seconds
    rss_bytes: int = 0
    kv_wanted_bytes: int = 0  # what the KV cache should be allowed, as things are
    step_s: float = 0.0  # how long the present step has been running; 0: none does
    saved_bytes: int = 0  # prefixes on disk


class Started(Message, frozen=True):
    """The sequence was accepted. Comes before its first Delta."""

    id: str
    prompt_ids: list[int]
    seed: int
    max_tokens: int  # after clipping to the window
    num_ctx: int  # the window that holds for this sequence
    truncated_tokens: int = 0  # prompt tokens that were dropped
    truncated_messages: int = 0
    rendered: str = ""  # the prompt as text; only with render_only


class Step(Message, frozen=True):
    """The deltas of one engine step, for all sequences, in one line."""

    deltas: list[Delta]
    stats: Stats | None = None  # with each step that changes what `ps` shows


class Embedded(Message, frozen=True):
    """L2-normalised vectors, in the order of the texts."""

    id: str
    vectors: list[list[float]]
    num_prompt_tokens: int


class Tokenized(Message, frozen=True):
    """The answer to Tokenize: both sides, whichever was asked."""

    id: str
    token_ids: list[int]
    text: str


class Failed(Message, frozen=True):
    """A request failed, or with `id` None the worker itself, which then ends.

    Codes: bad_request, too_long, unsupported, no_memory, bad_model, internal.
    """

    id: str | None
    code: str
    message: str


Request = Load | Generate | Embed | Tokenize | Cancel | SetKVBudget | Shutdown
Event = Loading | Ready | Started | Step | Embedded | Tokenized | Failed | Stats

_M = TypeVar("_M")
_encoder = msgspec.json.Encoder()
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(message: Request | Event) -> bytes:
    """The message as one line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ProtocolError if the line is no message from the daemon."""
    return _decode(_request_decoder, line)


def decode_event(line: bytes) -> Event:
    """Raises ProtocolError if the line is no message from a worker."""
    return _decode(_event_decoder, line)


def _decode(decoder: msgspec.json.Decoder[_M], line: bytes) -> _M:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{error}: {line[:200]!r}") from error
