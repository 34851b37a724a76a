"""What the compiled kernels' rounding costs, on the real model and a real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmd.backend.kernels.cpu_attention import Span
from llmd.backend.kernels.cpu_launch import Launcher, why_not
from llmd.backend.models.checkpoint import open_checkpoint
from llmd.backend.models.compiled_decoder import CompiledDecoder
from llmd.backend.models.decoder import Decoder, StepInputs
from llmd.backend.protocol import ModelFile
from llmd.backend.runner.kv_cache import KVCache
from llmd.backend.text.tokenizer import load_tokenizer

LICENSE = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 256


def _perplexity(decoder: Decoder | CompiledDecoder, ids: torch.Tensor) -> float:
    num_blocks = -(-len(ids) // 32)
    cache = KVCache(decoder.config, decoder.dtype, num_blocks, 32)
    positions = torch.arange(len(ids))
    table = torch.arange(num_blocks)
    inputs = StepInputs(
        ids,
        positions,
        table[positions // 32],
        positions % 32,
        (Span(0, len(ids), len(ids), table),),
        positions[:-1].clone(),
    )
    logits = decoder.forward(inputs, cache.layers)
    return float(torch.nn.functional.cross_entropy(logits, ids[1:]).exp())


@pytest.mark.skipif(bool(why_not()), reason=f"compiled kernels: {why_not()}")
def test_perplexity_is_within_one_percent_of_float32(smollm2_gguf: Path) -> None:
    files = [ModelFile(smollm2_gguf.name, "weights", str(smollm2_gguf))]
    text = LICENSE.read_text(encoding="utf-8")
    tokenizer = load_tokenizer(files, "")
    ids = torch.tensor(tokenizer.encode(text, add_special=False, parse_special=False)[:NUM_TOKENS])
    checkpoint = open_checkpoint(files)
    wanted = _perplexity(Decoder(checkpoint, torch.float32), ids)
    found = _perplexity(CompiledDecoder(checkpoint, Launcher(num_threads=2)), ids)
    assert found == pytest.approx(wanted, rel=0.01)
