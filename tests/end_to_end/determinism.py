"""One prompt says one thing, whatever happens around it: the trials, and a report of a full run.

    python -m tests.end_to_end.determinism benchmarks/results/determinism.md      (about 3 minutes)

Each prompt runs alone on a fresh engine; that is the reference. The trials run the same prompts in
a crowd, in chunks, preempted, from a warm cache, with drafts; every id must be equal, in one
attempt. `RULES_OFF` are the same trials with one rule of determinism switched off: they must
differ, or the trials would prove nothing.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.models.compiled_decoder import CompiledDecoder
from llmd.backend.models.decoder import StepInputs
from llmd.backend.protocol import Load, SamplingParams
from llmd.backend.runner import sampler
from llmd.backend.runner.model_runner import ModelRunner
from llmd.backend.text.tokenizer import load_tokenizer

from ..model_files import smollm2_gguf
from .truth import PROMPTS, gguf_files

NUM_TOKENS = 24
SEED = 20_261_130
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")

Answers = dict[str, list[int]]


@dataclass
class Stage:
    """The real weights on the default kernels, and the prompts in token ids."""

    runner: ModelRunner
    prompts: dict[str, list[int]]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    num_tokens: int = NUM_TOKENS

    def engine(self, **limits: object) -> Engine:
        """Fresh: no prefix is known."""
        config = SchedulerConfig(
            self.runner.num_blocks,
            self.runner.block_size,
            max_num_seqs=64,
            max_gap_ratio=0.0,
            **limits,  # type: ignore[arg-type]
        )
        return Engine(Scheduler(config), self.runner)

    def add(self, engine: Engine, name: str, suffix: str = "") -> None:
        prompt = self.prompts[name]
        engine.add(
            EngineRequest(
                name + suffix,
                tuple(prompt),
                len(prompt),
                self.num_tokens,
                self.sampling,
                seed=SEED + list(self.prompts).index(name),
            )
        )


def load_stage(num_prompts: int = 32, num_chars: int = 200) -> Stage:
    """Twenty short prompts, and between them twelve that grow by `num_chars` each."""
    files = gguf_files(smollm2_gguf())
    tokenizer = load_tokenizer(files)
    load = Load("determinism", "determinism", files, context_length=2048)
    runner = ModelRunner(open_checkpoint(files), load, lambda share, stage: None)
    long = [LICENSE[num_chars * i : num_chars * (2 * i + 1)] for i in range(12)]
    texts = [text for pair in zip(PROMPTS, long, strict=False) for text in pair] + [*PROMPTS[12:]]
    prompts = {f"p{i}": tokenizer.encode(text) for i, text in enumerate(texts[:num_prompts])}
    return Stage(runner, prompts)


# ------------------------------------------------------------------------- the trials


def drain(engine: Engine, between: Callable[[int], None] = lambda step: None) -> Answers:
    """Step until nothing is left."""
    answers: Answers = {}
    for step in range(100_000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            answers.setdefault(output.id, []).extend(output.token_ids)
        between(step)
    engine.check()
    assert engine.stats().blocks_in_use == 0
    return answers


def alone(stage: Stage) -> Answers:
    """The reference: each prompt on an engine of its own."""
    answers: Answers = {}
    for name in stage.prompts:
        engine = stage.engine()
        stage.add(engine, name)
        answers.update(drain(engine))
    return answers


def crowd(stage: Stage, seed: int = 1, **limits: object) -> Answers:
    """All at once, in random order, a few steps apart."""
    rng = random.Random(seed)
    engine = stage.engine(**limits)
    names = rng.sample(list(stage.prompts), len(stage.prompts))

    def arrive(step: int) -> None:
        for _ in range(rng.randint(0, 6)):
            if names:
                stage.add(engine, names.pop())

    arrive(0)
    answers: Answers = {}
    while names or engine.has_work:
        for output in engine.step():
            answers.setdefault(output.id, []).extend(output.token_ids)
        arrive(0)
    return answers


def preempted(stage: Stage) -> Answers:
    """Every other step a random few lose their blocks and start again."""
    rng = random.Random(2)
    engine = stage.engine()
    for name in stage.prompts:
        stage.add(engine, name)
    times = dict.fromkeys(stage.prompts, 0)

    def preempt(step: int) -> None:
        for name in rng.sample(list(stage.prompts), 3):
            if step % 2 == 1 and times[name] < 2 and engine.force_preempt(name):
                times[name] += 1

    answers = drain(engine, preempt)
    assert engine.stats().preemptions >= len(stage.prompts) // 2, engine.stats()
    return answers


def warm(stage: Stage) -> Answers:
    """A second time on the same engine: the prompts are found in the prefix cache."""
    engine = stage.engine()
    for suffix in ("/cold", "/warm"):
        for name in stage.prompts:
            stage.add(engine, name, suffix)
        answers = drain(engine)
    assert engine.stats().cached_tokens > 1000 * (len(stage.prompts) > 16), engine.stats()
    return {name.removesuffix("/warm"): ids for name, ids in answers.items()}


def drafted(stage: Stage) -> Answers:
    """Several tokens verified in one step, alone and four at a time."""
    answers: Answers = {}
    names = list(stage.prompts)
    for start in range(0, len(names), 4):
        engine = stage.engine(max_drafts=8)
        for name in names[start : start + 4]:
            stage.add(engine, name)
        answers.update(drain(engine))
    return answers


TRIALS: Mapping[str, Callable[[Stage], Answers]] = {
    "among all others, random order": lambda stage: crowd(stage, 1),
    "among all others, another order": lambda stage: crowd(stage, 2),
    "in chunks of 16": lambda stage: crowd(stage, 3, prefill_chunk=16),
    "in chunks of 64": lambda stage: crowd(stage, 4, prefill_chunk=64),
    "in chunks without limit": lambda stage: crowd(stage, 5, max_batch_tokens=100_000),
    "preempted by force": preempted,
    "from a warm cache": warm,
    "with speculation": drafted,
}

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "seeded, temperature 1": SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
}


def num_different(reference: Answers, answers: Answers) -> int:
    """Prompts whose ids are not those of the reference."""
    assert reference.keys() == answers.keys()
    return sum(reference[name] != answers[name] for name in reference)


# ------------------------------------------------------------------------ rules off


@contextmanager
def noise_with_a_state(stage: Stage) -> Iterator[None]:
    """The usual generator, whose next number depends on who drew before."""
    plain, generator = sampler.gumbel, np.random.default_rng(1)
    sampler.gumbel = lambda seed, position, ids: generator.gumbel(size=len(ids))
    try:
        yield
    finally:
        sampler.gumbel = plain


@contextmanager
def sums_that_follow_the_batch(stage: Stage) -> Iterator[None]:
    """Logits that are off in the last bit of a bfloat16, depending on the number of rows, as those
    of a matrix product are whose blocking follows its height."""
    decoder = stage.runner._decoder
    plain = decoder.forward

    def forward(inputs: StepInputs, caches: object) -> torch.Tensor:
        logits = plain(inputs, caches)  # type: ignore[arg-type]
        torch.manual_seed(len(inputs.token_ids))
        logits *= 1 + 2**-8 * torch.randn(logits.shape[-1])
        if isinstance(decoder, CompiledDecoder):  # it has looked for the best already
            decoder.best[: len(logits)] = logits.argmax(-1).numpy()
        return logits

    decoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.forward


RULES_OFF = {
    "noise is a stateless hash": (noise_with_a_state, "seeded, temperature 1"),
    "a row's sums don't depend on its batch": (sums_that_follow_the_batch, "greedy"),
}


def main() -> int:
    """Run everything, write the table; 1 if anything differed."""
    torch.set_num_threads(2)
    began = time.monotonic()
    stage = load_stage()
    lines = ["| sampling | trial | prompts | different |", "|---|---|---|---|"]
    wrong = 0
    references: dict[str, Answers] = {}
    for sampling_name, sampling in SAMPLINGS.items():
        stage.sampling = sampling
        references[sampling_name] = alone(stage)
        for name, trial in TRIALS.items():
            count = num_different(references[sampling_name], trial(stage))
            wrong += count
            lines.append(f"| {sampling_name} | {name} | {len(stage.prompts)} | {count} |")
            print(lines[-1], flush=True)
    lines += ["", "| rule switched off | sampling | prompts | different |", "|---|---|---|---|"]
    for name, (rule_off, sampling_name) in RULES_OFF.items():
        stage.sampling = SAMPLINGS[sampling_name]
        with rule_off(stage):
            count = num_different(references[sampling_name], crowd(stage))
        wrong += count == 0
        lines.append(f"| {name} | {sampling_name} | {len(stage.prompts)} | {count} |")
        print(lines[-1], flush=True)
    lengths = sorted(len(prompt) for prompt in stage.prompts.values())
    text = (
        "# Determinism on the CPU\n\n`scripts/determinism`: SmolLM2-135M-Instruct Q4_1, kernels "
        f"{stage.runner.details['kernels']}, {len(lengths)} prompts of {lengths[0]} to "
        f"{lengths[-1]} tokens, {NUM_TOKENS} tokens each, {time.monotonic() - began:.0f} s. The "
        "reference is each prompt alone; `different` counts prompts whose token ids are not equal "
        "to it. One attempt, no reruns.\n\n"
    )
    Path(sys.argv[1]).write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
