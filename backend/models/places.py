"""Where a tensor of the canonical decoder lies in a file.

Canonical names are those that Hugging Face gives a Llama, and for what a Llama hasn't these parts:

    attention_out_norm, mlp_out_norm     norms of a branch, before it is added
    self_attn.sinks                      one logit per head
    mlp.router                           logits of the experts
    mlp.experts.{e}.gate_proj            a matrix of one expert; up_proj and down_proj likewise
    mlp.shared.gate_proj, mlp.shared_gate
    self_attn.gate_proj                  what each head's answer is multiplied with
    conv.in_proj, conv.conv, …           a short convolution; see state_layers
    delta.qkv, delta.z, delta.conv, …    a gated delta net; see there

A family's `Names` say how its files spell them; what they do not name is spelled as in a Llama.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .config import ModelConfig, Names

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")

_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    "mlp.shared.gate_proj": "ffn_gate_shexp",
    "mlp.shared.up_proj": "ffn_up_shexp",
    "mlp.shared.down_proj": "ffn_down_shexp",
}
_HF_PARTS = {"mlp.router": "mlp.gate"}


@dataclass(frozen=True, slots=True)
class Place:
    """A stored tensor, and which part of it is meant."""

    name: str
    rows: slice | list[int] | None = None  # of the first dimension
    expert: int | None = None  # an index into the first dimension; `rows` are of what is left
    is_transposed: bool = False  # the matrix of the expert is [inputs, outputs]
    pairs_of_heads: int = 0  # the rows of so many heads stand in adjacent pairs
    adds_one: bool = False


def unpaired(rows: Tensor, num_heads: int) -> Tensor:
    """Rows in adjacent pairs (0, 1), (2, 3) of each head to pairs (i, i + n)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class Places:
    """Finds the place of a canonical name in one file."""

    def __init__(self, config: ModelConfig, is_gguf: bool, has: Callable[[str], bool]) -> None:
        self._config = config
        self._is_gguf = is_gguf
        self._has = has
        self._names: Names = config.family.gguf if is_gguf else config.family.hf
        defaults: Mapping[str, str] = _GGUF_PARTS if is_gguf else _HF_PARTS
        self._parts = {**defaults, **self._names.parts}
        self._fused = {
            part: (stored, parts) for stored, parts in self._names.fused.items() for part in parts
        }

    def find(self, name: str) -> Place:
        """The place, whether or not something lies there."""
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            return self._top(name)
        index, part, kind = match.groups()
        prefix = f"blk.{index}." if self._is_gguf else f"model.layers.{index}."
        expert = _EXPERT.fullmatch(part)
        if expert is not None:
            return self._expert(prefix, int(expert[1]), f"{expert[2]}_proj", kind)
        if part in self._names.picks:
            stored, rows_of = self._names.picks[part]
            return Place(f"{prefix}{stored}{kind}", list(rows_of(self._config)))
        fused, parts = self._fused.get(part, ("", ()))
        if fused and self._has(f"{prefix}{fused}{kind}"):
            return Place(f"{prefix}{fused}{kind}", self._rows(int(index), part, parts))
        stored = self._parts.get(part, part)
        return Place(
            f"{prefix}{stored}{kind}",
            pairs_of_heads=self._pairs(int(index), part),
            adds_one=self._names.norms_minus_one and "norm" in part,
        )

    def _top(self, name: str) -> Place:
        stored = name
        if name in self._parts:
            stored = self._parts[name]
        elif self._is_gguf:
            stored = _GGUF_TOP.get(name, name)
        return Place(stored, adds_one=self._names.norms_minus_one and name == "model.norm.weight")

    def _expert(self, prefix: str, expert: int, part: str, kind: str) -> Place:
        if self._is_gguf:
            short = part.removesuffix("_proj")
            fused = f"{prefix}ffn_gate_up_exps{kind}"
            if part != "down_proj" and self._has(fused):
                return self._half(fused, expert, part)
            return Place(f"{prefix}ffn_{short}_exps{kind}", expert=expert)
        single = self._parts.get(f"mlp.experts.{part}", f"mlp.experts.{{e}}.{part}")
        single = f"{prefix}{single.format(e=expert)}{kind}"
        if self._has(single):
            return Place(single)
        stack = self._parts.get("mlp.experts", "mlp.experts")
        suffix = "_bias" if kind == ".bias" else ""
        if part != "down_proj":
            return self._half(f"{prefix}{stack}.gate_up_proj{suffix}", expert, part)
        is_transposed = self._names.experts_transposed and not suffix
        return Place(f"{prefix}{stack}.down_proj{suffix}", None, expert, is_transposed)

    def _half(self, stored: str, expert: int, part: str) -> Place:
        """Gate or up of a stack that holds both."""
        is_up = part == "up_proj"
        if self._names.experts_transposed:  # gpt-oss: gate and up alternate
            return Place(stored, slice(int(is_up), None, 2), expert, not stored.endswith("_bias"))
        assert self._config.experts is not None
        inner = self._config.experts.intermediate_size
        return Place(stored, slice(inner, None) if is_up else slice(0, inner), expert)

    def _rows(self, index: int, part: str, parts: tuple[str, ...]) -> slice:
        begin = 0
        for other in parts:
            count = self._num_rows(index, other)
            if other == part:
                return slice(begin, begin + count)
            begin += count
        raise AssertionError(f"{part} is none of {parts}")

    def _num_rows(self, index: int, part: str) -> int:
        layer = self._config.layers[index]
        if part == "self_attn.q_proj":
            return self._config.num_heads * layer.head_dim
        if part in ("self_attn.k_proj", "self_attn.v_proj"):
            return layer.num_kv_heads * layer.head_dim
        assert part in ("mlp.gate_proj", "mlp.up_proj"), part
        return self._config.intermediate_size

    def _pairs(self, index: int, part: str) -> int:
        if not (self._is_gguf and self._config.family.gguf_permutes_qk):
            return 0
        if part == "self_attn.q_proj":
            return self._config.num_heads
        return self._config.layers[index].num_kv_heads if part == "self_attn.k_proj" else 0
