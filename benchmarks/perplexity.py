"""Perplexity over a fixed text of 40 windows of 512 tokens, beside llama.cpp's on the same file.

    python benchmarks/perplexity.py MODEL.gguf TEXT [--llama llama-perplexity] [--dtype float32]

As llama-perplexity does it: windows do not overlap, each begins with the model's opening token if
it has one, and the second half of a window is what counts (255 tokens of 512).
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from llmd.backend.kernels.cpu_attention import Span
from llmd.backend.models.build import build_decoder
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.models.decoder import StepInputs
from llmd.backend.protocol import ModelFile
from llmd.backend.runner.kv_cache import KVCache
from llmd.backend.runner.kv_layout import layout_of
from llmd.backend.runner.model_runner import BLOCK_SIZE, choose_dtype, usable_cores
from llmd.backend.text.tokenizer import load_tokenizer

WINDOW = 512
NUM_WINDOWS = 40


def main() -> None:
    """Parse, measure, print one line of a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--llama", help="the llama-perplexity to compare with")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS)
    args = parser.parse_args()
    ours, kernels = perplexity(args.model, args.text, args.dtype, args.windows)
    line = f"| {args.model.name} | {args.windows} | {ours:.4f} | {kernels} |"
    if args.llama:
        theirs = llama_perplexity(args.llama, args.model, args.text, args.windows)
        line += f" {theirs:.4f} | {ours / theirs - 1:+.2%} |"
    print(line)


def perplexity(model: Path, text: Path, dtype: str, num_windows: int) -> tuple[float, str]:
    """And which kernels computed it."""
    files = [ModelFile(model.name, "weights", str(model))]
    tokenizer = load_tokenizer(files)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special=True)
    assert len(ids) >= WINDOW * num_windows, f"the text has {len(ids)} tokens"
    threads = usable_cores()
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(files)
    chosen = choose_dtype(dtype)
    decoder, kernels = build_decoder(
        checkpoint,
        None if dtype == "auto" else chosen,
        threads,
        lambda share, stage: None,
        chosen,
    )
    layout = layout_of(checkpoint.config, WINDOW)
    groups = layout.groups.num_groups
    per_group = WINDOW // BLOCK_SIZE
    cache = KVCache(checkpoint.config, decoder.dtype, groups * per_group, BLOCK_SIZE, layout)
    tables = torch.arange(groups * per_group).view(groups, per_group)
    cache.touch(range(groups * per_group))
    loss, count, began = 0.0, 0, time.monotonic()
    for index in range(num_windows):
        window = ids[index * WINDOW : (index + 1) * WINDOW]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            window[0] = tokenizer.bos_id
        logits = decoder.forward(step(window, tables), cache.layers)
        for row, wanted in zip(logits, window[WINDOW // 2 + 1 :], strict=True):
            loss += float(torch.logsumexp(row, 0) - row[wanted])
            count += 1
        seconds = time.monotonic() - began
        running = math.exp(loss / count)
        print(f"[{index + 1}] {running:.4f} after {seconds:.0f} s", file=sys.stderr, flush=True)
    return math.exp(loss / count), kernels


def step(window: list[int], tables: torch.Tensor) -> StepInputs:
    """One window as a step whose second half wants logits, but for its last token."""
    at = torch.arange(WINDOW)
    views = [
        StepInputs(
            token_ids=torch.tensor(window),
            positions=at,
            block_ids=table[at // BLOCK_SIZE],
            offsets=at % BLOCK_SIZE,
            spans=(Span(0, WINDOW, WINDOW, table),),
            logit_rows=torch.arange(WINDOW // 2, WINDOW - 1),
            others=(),
        )
        for table in tables
    ]
    first, *others = views
    return StepInputs(
        first.token_ids,
        first.positions,
        first.block_ids,
        first.offsets,
        first.spans,
        first.logit_rows,
        others=tuple(others),
    )


def llama_perplexity(program: str, model: Path, text: Path, num_windows: int) -> float:
    """What llama.cpp says."""
    command = [program, "-m", str(model), "-f", str(text), "-c", str(WINDOW)]
    command += ["--chunks", str(num_windows), "-t", str(usable_cores())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"PPL = ([0-9.]+)", done.stdout + done.stderr)
    assert found, done.stderr[-2000:]
    return float(found[1])


if __name__ == "__main__":
    main()
