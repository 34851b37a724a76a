"""Small tokenizers in the form in which GGUF files carry them, made in a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmd.backend.text.token_bytes import byte_of_character
from llmd.backend.text.tokenizer import Tokenizer, from_gguf_metadata

WORDS = ["th", "he", "the", "in", "er", "Ġt", "Ġa", "Ġthe", 'Ġ"', '":', "ĊĠ"]
CONTROL_TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]


def byte_level_metadata(more_control_tokens: Sequence[str] = ()) -> dict[str, Any]:
    """Every byte, a few words, four control tokens or more; `<|im_start|>` opens texts."""
    control_tokens = [*CONTROL_TOKENS, *more_control_tokens]
    alphabet = sorted(byte_of_character(), key=lambda character: byte_of_character()[character])
    merges = ["t h", "h e", "th e", "i n", "e r", "Ġ t", "Ġ a", "Ġt he", 'Ġ "', '" :', "Ċ Ġ"]
    tokens = [*alphabet, *WORDS, *control_tokens]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(control_tokens))
        + [3] * len(control_tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def sentence_piece_metadata() -> dict[str, Any]:
    """Byte fallback, and pieces whose scores say which join first."""
    pieces = ["▁", "e", "t", "h", "a", "o", "▁t", "he", "▁the", "▁a", "l", "ll", "ello", "el", "lo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    first = len(tokens) - len(pieces)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * first + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def byte_level(more_control_tokens: Sequence[str] = ()) -> Tokenizer:
    return from_gguf_metadata(byte_level_metadata(more_control_tokens))


def sentence_piece() -> Tokenizer:
    return from_gguf_metadata(sentence_piece_metadata())
