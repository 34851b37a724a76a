"""A saved checkpoint as a GGUF: names and keys by the `gguf` package, values as llama.cpp's
converter writes them (rows of q and k in pairs, Gemma's norms with their 1, experts in stacks).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_PAIRED = ("llama", "granite", "smollm3")
_ONE_ADDED = ("gemma", "gemma2", "gemma3")
_EXPERT = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def write_gguf(architecture: str, source: Path, folder: Path) -> None:
    """One F32 file in `folder` from the safetensors in `source`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    _write_keys(writer, architecture, config)
    tensors = _stacked(load_file(source / "model.safetensors"), config)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, values in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, _changed(architecture, name, values, config))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    full = rope.get("full_attention", rope)
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    kv_heads = config["num_key_value_heads"]
    size = config["intermediate_size"]
    if architecture == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
        size = -(-int(2 * size / 3) // 32) * 32
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(size)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma3":
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config["layer_types"]],
        )
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if full.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])


def _stacked(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The experts' matrices as one tensor of each kind, under the names that `gguf` maps."""
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacks[f"{match[1]}.mlp.experts.{match[3]}_proj.weight"][int(match[2])] = values
        elif name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = values
    for name, by_index in stacks.items():
        found[name] = np.stack([by_index[index] for index in sorted(by_index)])
    return found


def _changed(architecture: str, name: str, values: Any, config: dict[str, Any]) -> Any:
    if architecture in _ONE_ADDED and "norm" in name:
        return values + 1
    if name.endswith("conv.conv.weight"):
        return values.squeeze(1)
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in _PAIRED and part in name:
            halves = values.reshape(config[key], 2, -1, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return np.ascontiguousarray(values)
