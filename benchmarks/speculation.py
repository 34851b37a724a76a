"""What drafts are worth: the same prompts with and without, in turn, on the real model.

    python -m llmd.benchmarks.speculation MODEL.gguf --out benchmarks/results/speculation.md

Copying tasks answer with much of their own prompt (edit, quote, reformat); free text does not. Each
prompt runs alone, greedily, to the end of its answer, `--rounds` times with drafts and as often
without, one after the other, so that a disturbance of the machine hits both. The ids must be equal,
or the run stops. With `--cpu-time` one thread runs and the processor's seconds are counted, which
other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmd.backend.assembly import MAX_DRAFTS
from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.protocol import Load, ModelFile, SamplingParams
from llmd.backend.runner.model_runner import ModelRunner
from llmd.backend.text.tokenizer import Tokenizer, load_tokenizer

NUM_TOKENS = 160
TEXT = (
    "Every morning the fisherman walked to the harbour, counted his seven nets, and sailed out "
    "past the lighthouse before the sun was up. His daughter Anna kept the books and mended the "
    "sails. In winter, when the sea was too rough, they sat by the stove and wrote letters north."
)
CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        if item.quantity > 0:
            total = total + item.price * item.quantity
    return total + total * tax_rate
"""
COPYING = {
    "repeat": (f"Repeat this text exactly:\n\n{TEXT}", ""),
    "edit": (f"Edit this text: replace Anna by Maria, and change nothing else.\n\n{TEXT}", ""),
    "correct": (f"Correct the spelling of this text and write it again:\n\n{TEXT}", TEXT[:60]),
    "code": (f"Rename `items` to `products` in this code:\n\n```python\n{CODE}```", "```python\n"),
}
FREE = {
    "story": ("Tell me a story about a lighthouse.", ""),
    "sky": ("Why is the sky blue?", ""),
    "letter": ("Write a letter to a friend about your garden.", ""),
    "plan": ("How do I plan a week in the mountains with two children?", ""),
}


@dataclass(frozen=True, slots=True)
class Timed:
    ids: list[int]
    seconds: float
    steps: int


class Bench:
    """One loaded model."""

    def __init__(self, path: Path, num_threads: int, clock: Callable[[], float]) -> None:
        files = [ModelFile(path.name, "weights", str(path))]
        load = Load("bench", "bench", files, context_length=2048, num_threads=num_threads)
        self._clock = clock
        self.tokenizer: Tokenizer = load_tokenizer(files)
        self.runner = ModelRunner(open_checkpoint(files), load, lambda share, stage: None)

    def run(self, prompt: list[int], max_drafts: int) -> Timed:
        """Seconds from the first token to the last; the prompt's reading is the same in both."""
        config = SchedulerConfig(
            self.runner.num_blocks, self.runner.block_size, max_drafts=max_drafts
        )
        engine = Engine(Scheduler(config), self.runner, self._clock)
        sampling = SamplingParams(temperature=0)
        ends = self.tokenizer.eos_ids
        engine.add(
            EngineRequest("a", tuple(prompt), len(prompt), NUM_TOKENS, sampling, stop_ids=ends)
        )
        ids = [id for output in engine.step() for id in output.token_ids]
        began = self._clock()
        while engine.has_work:
            ids += [id for output in engine.step() for id in output.token_ids]
        return Timed(ids, self._clock() - began, engine.stats().steps)

    def prompt(self, question: str, answer_so_far: str) -> list[int]:
        """The model's own chat form, ChatML."""
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer_so_far}"
        return self.tokenizer.encode(text, True, True)


def compare(bench: Bench, kind: str, tasks: dict[str, tuple[str, str]], rounds: int) -> list[str]:
    """A row for each task, and one for all: the ratio of the medians' sums."""
    lines = []
    plain_s = drafted_s = 0.0
    for name, (question, so_far) in tasks.items():
        prompt = bench.prompt(question, so_far)
        plain: list[Timed] = []
        drafted: list[Timed] = []
        for _ in range(rounds):
            plain.append(bench.run(prompt, 0))
            drafted.append(bench.run(prompt, MAX_DRAFTS))
            assert plain[-1].ids == drafted[-1].ids, f"{name}: drafts changed the text"
        a = statistics.median(run.seconds for run in plain)
        b = statistics.median(run.seconds for run in drafted)
        plain_s, drafted_s = plain_s + a, drafted_s + b
        lines.append(
            f"| {kind} | {name} | {len(plain[0].ids)} | {len(plain[0].ids) / a:.0f} "
            f"| {len(plain[0].ids) / b:.0f} | {a / b:.2f} | {plain[0].steps} "
            f"| {drafted[0].steps} |"
        )
        print(lines[-1], flush=True)
    lines.append(f"| {kind} | **all** | | | | **{plain_s / drafted_s:.2f}** | | |")
    print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Parse, run, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    bench = Bench(options.model, int(options.cpu_time), clock)
    bench.run(bench.prompt("Warm up.", ""), MAX_DRAFTS)
    lines = [
        "| kind | task | tokens | tok/s plain | with drafts | ratio | steps plain | drafted |",
        "|---|---|---|---|---|---|---|---|",
        *compare(bench, "copying", COPYING, options.rounds),
        *compare(bench, "free", FREE, options.rounds),
    ]
    kind = ", of the processor" if options.cpu_time else ""
    if options.out:
        title = (
            "# Speculation from the sequence's own text\n\n"
            f"`python -m llmd.benchmarks.speculation {options.model.name} --rounds "
            f"{options.rounds}`: one stream, greedy, to the end of the answer or {NUM_TOKENS} "
            f"tokens, medians, seconds from the first token on{kind}; "
            f"{bench.runner.details['threads']} threads, kernels "
            f"{bench.runner.details['kernels']}. The ids are equal in every run.\n\n"
        )
        options.out.write_text(title + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
