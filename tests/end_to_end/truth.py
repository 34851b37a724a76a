"""The twenty prompts that every engine must continue alike, and who continues them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.protocol import Load, ModelFile, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner
from llmd.backend.text.tokenizer import Tokenizer, load_tokenizer
from llmd.registry.formats.gguf import read_header

NUM_TOKENS = 64
MAX_BATCH_TOKENS = 512

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three laws of robotics are: 1.",
    "In 1969, the first human",
    "To make an omelette, first",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Dear Sir or Madam,\n\nI am writing to",
    "The largest planet in the solar system is",
    "Q: What is 12 plus 30?\nA:",
    "import numpy as np\n\n# compute the mean of an array\n",
    "Les enfants jouent dans le jardin et",
    "Roses are red, violets are",
    "The mitochondria is",
    "SELECT name, age FROM people WHERE",
    "She opened the door and saw",
    "The following is a list of prime numbers: 2, 3, 5, 7,",
    "Photosynthesis is the process by which",
    "It was the best of times, it was the worst of times, " * 6,
)


def gguf_files(path: Path) -> list[ModelFile]:
    """A single GGUF as the worker gets it."""
    return [ModelFile(path.name, "weights", str(path))]


def folder_files(folder: Path) -> list[ModelFile]:
    """A Hugging Face folder as the worker gets it."""
    roles = {".safetensors": "weights"}
    return [
        ModelFile(path.name, roles.get(path.suffix, "config"), str(path))
        for path in sorted(folder.iterdir())
    ]


def config_for_transformers(gguf: Path) -> transformers.LlamaConfig:
    """What the file's metadata says, read without our own reading of it."""
    metadata = read_header(gguf).metadata
    num_heads = metadata["llama.attention.head_count"]
    return transformers.LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.embedding_length"] // num_heads,
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=metadata["llama.rope.freq_base"],
        max_position_embeddings=metadata["llama.context_length"],
        tie_word_embeddings=True,
    )


def save_for_transformers(gguf: Path, folder: Path) -> None:
    """The GGUF's weights, dequantised to float32, as a folder that transformers loads."""
    checkpoint = open_checkpoint(gguf_files(gguf))
    model = transformers.LlamaForCausalLM(config_for_transformers(gguf))
    state = {
        name: checkpoint.tensor(name, torch.float32)
        for name in model.state_dict()
        if name != "lm_head.weight"
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.save_pretrained(folder)


def continued_by_transformers(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations in float32 by `generate`, all prompts in one padded call."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    output = model.generate(
        torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    continued: list[list[int]] = output[:, width:].tolist()
    return continued


@dataclass
class TruthEngine:
    """Our engine over real weights, and its prompts in token ids."""

    tokenizer: Tokenizer
    runner: ModelRunner

    @classmethod
    def load(cls, files: list[ModelFile], tokenizer: Tokenizer, dtype: str) -> TruthEngine:
        # One thread: memory is what a step waits for, and other tests run on the other core.
        load = Load("truth", "truth", files, dtype=dtype, context_length=1024, num_threads=1)
        runner = ModelRunner(open_checkpoint(files), load, lambda share, stage: None)
        return cls(tokenizer, runner)

    def engine(self, chunk: int = 0, max_batch_tokens: int = MAX_BATCH_TOKENS) -> Engine:
        """A fresh scheduler, so that no prefix is known."""
        config = SchedulerConfig(
            num_blocks=self.runner.num_blocks,
            block_size=self.runner.block_size,
            max_num_seqs=32,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=chunk,
        )
        return Engine(Scheduler(config), self.runner)


def add(engine: Engine, id: str, prompt: Sequence[int], **fields: object) -> None:
    """Queue a prompt that is continued greedily and does not stop early."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    engine.add(
        EngineRequest(
            id,
            tuple(prompt),
            len(prompt),
            NUM_TOKENS,
            sampling=sampling,  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]
        )
    )


def run(engine: Engine, preempt_at: Iterable[int] = ()) -> dict[str, list[int]]:
    """Step until nothing is left. At the given steps every running sequence is preempted."""
    found: dict[str, list[int]] = {}
    moments = set(preempt_at)
    for step in range(100_000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            found.setdefault(output.id, []).extend(output.token_ids)
        if step in moments:
            for id in list(found):
                engine.force_preempt(id)
    engine.check()
    assert engine.stats().blocks_in_use == 0
    return found


def tokenizer_of(gguf: Path) -> Tokenizer:
    """The GGUF's own."""
    return load_tokenizer(gguf_files(gguf))
