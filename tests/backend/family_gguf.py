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

_PAIRED = ("llama", "granite", "smollm3", "mistral3")
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
_EXPERT = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(experts\.\d+|gate)(?:\.(w[123]))?\.weight")
_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_gguf(architecture: str, source: Path, folder: Path) -> None:
    """One F32 file in `folder` from the safetensors in `source`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    _write_keys(writer, architecture, config)
    tensors = _regrouped(architecture, load_file(source / "model.safetensors"), config)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, values in tensors.items():
        stored = _SPECIAL.get(name.split(".", 3)[-1], "")
        if stored:
            stored = f"blk.{name.split('.')[2]}.{stored}"
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        assert stored, name
        writer.add_tensor(stored, _changed(architecture, name, values, config))
    if architecture == "gemma4":
        still = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)  # a quarter of 32 turns
        writer.add_tensor("rope_freqs.weight", still)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Where `gguf` maps a module's name, but the tensor is none of its weights.
_SPECIAL = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


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
    if architecture != "gemma4":
        writer.add_key_length(head_dim)
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    for key, add in (
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if key in config:
            add(config[key])
    if full.get("rope_type") == "yarn":
        _write_yarn_keys(writer, full)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    kv_heads = config["num_key_value_heads"]
    size = config["intermediate_size"]
    if architecture == "lfm2":
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
        size = -(-int(2 * size / 3) // 32) * 32
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if architecture != "gemma4":
        writer.add_head_count_kv(kv_heads)
    if config.get("use_double_wide_mlp"):
        first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
        size = [size if i < first else 2 * size for i in range(config["num_hidden_layers"])]
    writer.add_feed_forward_length(size)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma3":
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config["layer_types"]],
        )
    if architecture == "gemma4":
        _write_gemma4_keys(writer, config)
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(
            config["linear_num_value_heads"] * config["linear_value_head_dim"]
        )
        writer.add_full_attention_interval(4)
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("moe_intermediate_size") or "num_local_experts" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        active = config.get("num_experts_per_tok") or config["top_k_experts"]
        writer.add_expert_used_count(active)
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        writer.add_expert_feed_forward_length(inner)
    if full.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])


def _write_yarn_keys(writer: Any, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_gemma4_keys(writer: Any, config: dict[str, Any]) -> None:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = config["per_layer_config"]
    heads = config["num_key_value_heads"]
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_key_length(32)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(10000.0)
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_head_count_kv(
        [own.get(str(i), {}).get("num_key_value_heads", heads) for i in range(len(windowed))]
    )


def _regrouped(
    architecture: str, tensors: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """With value heads in llama.cpp's order for Qwen3.5, and Qwen3-Next's parts apart."""
    found = {}
    for name, values in _stacked(tensors, config).items():
        if name.endswith("in_proj_qkvz.weight"):
            key_heads, key, value = 2, 16, 32  # of the cases; value is that of a key head
            groups = values.reshape(key_heads, 2 * key + 2 * value, -1)
            cuts = np.split(groups, [key, 2 * key, 2 * key + value], axis=1)
            flat = [cut.reshape(-1, values.shape[1]) for cut in cuts]
            prefix = name.removesuffix("in_proj_qkvz.weight")
            found[f"{prefix}in_proj_qkv.weight"] = np.concatenate(flat[:3])
            found[f"{prefix}in_proj_z.weight"] = flat[3]
        elif architecture.startswith("qwen35") and ".linear_attn." in name:
            found[name] = _tiled(name, values, config)
        else:
            found[name] = values
    return found


def _tiled(name: str, values: Any, config: dict[str, Any]) -> Any:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def reorder(rows: Any) -> Any:
        grouped = rows.reshape(key_heads, value_heads // key_heads, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if name.endswith("linear_attn.norm.weight"):
        return values
    if "out_proj" in name:
        return np.ascontiguousarray(reorder(values.T).T)
    if "in_proj_qkv" in name or "conv1d" in name:
        keys = 2 * key_heads * config["linear_key_head_dim"]
        return np.concatenate((values[:keys], reorder(values[keys:])))
    return reorder(values)


def _stacked(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The experts' matrices as one tensor of each kind, under the names that `gguf` maps."""
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = defaultdict(dict)
    if config["model_type"] == "gpt_oss":
        tensors = _gpt_oss_experts(tensors)
    if config["model_type"] == "mixtral":
        tensors = {_as_qwen(name): values for name, values in tensors.items()}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacks[f"{match[1]}.mlp.experts.{match[3]}_proj.weight"][int(match[2])] = values
        elif name.endswith("mlp.experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            is_stack = name.endswith(("experts.down_proj", "experts.gate_up_proj"))
            found[f"{name}.weight" if is_stack else name] = values
    for name, by_index in stacks.items():
        found[name] = np.stack([by_index[index] for index in sorted(by_index)])
    return found


def _as_qwen(name: str) -> str:
    """Mixtral's names of experts as all others spell them."""
    match = _MIXTRAL.fullmatch(name)
    if match is None:
        return name
    part = f".{_MIXTRAL_PARTS[match[3]]}" if match[3] else ""
    return f"{match[1]}.mlp.{match[2]}{part}.weight"


def _gpt_oss_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Stacks of [experts, inputs, outputs], in which gate and up alternate, as others have them."""
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for start, which in enumerate(("gate", "up")):
                found[f"{prefix}.{which}_proj.weight"] = values[..., start::2].swapaxes(1, 2)
        elif part == "gate_up_proj_bias":
            for start, which in enumerate(("gate", "up")):
                found[f"{prefix}.{which}_proj.bias"] = values[..., start::2]
        elif part == "down_proj_bias":
            found[f"{prefix}.down_proj.bias"] = values
        elif part == "down_proj" and prefix.endswith("experts"):
            found[f"{prefix}.down_proj.weight"] = values.swapaxes(1, 2)
        else:
            found[name] = values
    return found


def _changed(architecture: str, name: str, values: Any, config: dict[str, Any]) -> Any:
    if architecture in _ONE_ADDED and "norm" in name and "linear_attn" not in name:
        return values + 1
    if name.endswith("A_log"):
        return -np.exp(values)
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return values.squeeze(1)
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in _PAIRED and part in name:
            halves = values.reshape(config[key], 2, -1, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return np.ascontiguousarray(values)
