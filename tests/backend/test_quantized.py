"""Quantised safetensors: each layout, written here from its definition, means the right floats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmd.backend.models.config import BadModel, UnsupportedModel
from llmd.backend.models.container import Container, open_container
from llmd.backend.protocol import ModelFile
from llmd.registry.formats import quantization

N, K, GROUP = 48, 128, 32
STEM = "model.layers.0.mlp.down_proj"
NAME = STEM + ".weight"


def opened(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Container:
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return open_container(
        [
            ModelFile("config.json", "config", str(folder / "config.json")),
            ModelFile("model.safetensors", "weights", str(folder / "model.safetensors")),
        ]
    )


def check(container: Container, wanted: Tensor, bits: int | None) -> None:
    """`bits` of the integers that are computed with as stored; None: the weight is dequantised."""
    assert NAME in container.names
    found = container.tensor(NAME, torch.float32)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(container.tensor(NAME, torch.bfloat16), found.bfloat16())
    blocks = container.blocks(NAME)
    assert (None if blocks is None else blocks.bits) == bits
    if blocks is not None:
        dense = blocks.quants.float() * blocks.scale.float().unsqueeze(-1)
        if blocks.offset is not None:
            dense += blocks.offset.float().unsqueeze(-1)
        assert (dense.flatten(1) - wanted).abs().max() <= 2**-10 * wanted.abs().max()


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=rng(sum(shape)), dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=rng(1)) * 0.01 + 0.001).half()


def by_group(values: Tensor, group: int = GROUP) -> Tensor:
    """[N, groups] to [N, K]."""
    return values.float().repeat_interleave(group, 1)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes along the last dimension into int32; order[j] is the code at place j of a word."""
    count = 32 // bits
    parts = torch.unflatten(codes.long(), -1, (-1, count))[..., list(order or range(count))]
    shifted = (parts << (torch.arange(count) * bits)).sum(-1)
    return torch.where(shifted >= 2**31, shifted - 2**32, shifted).to(torch.int32)


def test_awq(tmp_path: Path) -> None:
    q, z, s = codes(16, N, K), codes(16, N, K // GROUP), scales(N, K // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{STEM}.qweight": words(q.t(), 4, order),
        f"{STEM}.qzeros": words(z.t(), 4, order),
        f"{STEM}.scales": s.t().contiguous(),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    container = opened(tmp_path, settings, tensors)
    check(container, (q - by_group(z)) * by_group(s), bits=4)
    assert container.quantization == "AWQ"
    with pytest.raises(UnsupportedModel, match="form gemv is not supported; gemm"):
        opened(tmp_path, settings | {"version": "gemv"}, tensors)
    with pytest.raises(BadModel, match=r"no tensor .*down_proj\.qzeros"):
        del tensors[f"{STEM}.qzeros"]
        opened(tmp_path, settings, tensors).tensor(NAME, torch.float32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(bits: int, form: str, desc_act: bool, tmp_path: Path) -> None:
    q, s = codes(1 << bits, N, K), scales(N, K // GROUP)
    z = codes((1 << bits) - 1, N, K // GROUP) + 1
    g_idx = torch.arange(K, dtype=torch.int32) // GROUP
    if desc_act:
        g_idx = g_idx[torch.randperm(K, generator=rng(3))]
    tensors = {
        f"{STEM}.qweight": words(q, bits).t().contiguous(),
        f"{STEM}.qzeros": words((z - int(form == "gptq")).t(), bits),
        f"{STEM}.scales": s.t().contiguous(),
        f"{STEM}.g_idx": g_idx,
    }
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": form}
    wanted = (q - z.float()[:, g_idx]) * s.float()[:, g_idx]
    expected = None if desc_act or bits == 8 else 4
    check(opened(tmp_path, settings, tensors), wanted, expected)


def test_gptq_of_symmetric_8_bit_is_computed_with_as_it_is(tmp_path: Path) -> None:
    q, s = codes(256, N, K), scales(N, K // GROUP)
    tensors = {
        f"{STEM}.qweight": words(q, 8).t().contiguous(),
        f"{STEM}.qzeros": words(torch.full((K // GROUP, N), 127), 8),
        f"{STEM}.scales": s.t().contiguous(),
    }
    container = opened(tmp_path, {"quant_method": "gptq", "bits": 8}, tensors)
    check(container, (q - 128) * by_group(s), bits=8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packed(
    bits: int, symmetric: bool, strategy: str, tmp_path: Path
) -> None:
    groups = K // GROUP if strategy == "group" else 1
    middle = 1 << (bits - 1)
    q, s = codes(2 * middle, N, K) - middle, scales(N, groups)
    z = codes(2 * middle, N, groups) - middle
    tensors = {
        f"{STEM}.weight_packed": words(q + middle, bits),
        f"{STEM}.weight_scale": s.bfloat16(),
        f"{STEM}.weight_shape": torch.tensor([N, K]),
    }
    zero = torch.zeros(N, groups) if symmetric else z.float()
    if not symmetric:
        packed = words((z + middle).t(), bits).t().contiguous()  # packed along the outputs
        tensors[f"{STEM}.weight_zero_point"] = packed
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    wanted = (q - by_group(zero, K // groups)) * by_group(s.bfloat16(), K // groups)
    expected = 4 if bits == 4 else 8 if symmetric else None
    check(opened(tmp_path, settings, tensors), wanted, expected)


@pytest.mark.parametrize("shape", [(N, 1), (1,), (N, K // GROUP)])
def test_compressed_tensors_int8(shape: tuple[int, ...], tmp_path: Path) -> None:
    q, s = (codes(256, N, K) - 128).to(torch.int8), scales(*shape)
    spread = s.float().reshape(-1, 1) if len(shape) == 1 or shape[1] == 1 else by_group(s)
    settings = _compressed("int-quantized", {"num_bits": 8, "type": "int"})
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.weight_scale": s})
    check(container, q * spread, bits=8)


def _compressed(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
    }


def floats8() -> Tensor:
    return torch.randn((N, K), generator=rng(5)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(N, 1), (1,)])
def test_compressed_tensors_fp8(shape: tuple[int, ...], tmp_path: Path) -> None:
    q, s = floats8(), scales(*shape).float()
    settings = _compressed("float-quantized", {"num_bits": 8, "type": "float"})
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.weight_scale": s})
    check(container, q.float() * s.reshape(-1, 1), bits=None)
    with pytest.raises(UnsupportedModel, match=r"nvfp4-pack-quantized.*pack-quantized"):
        opened(tmp_path, _compressed("nvfp4-pack-quantized", {}), {NAME: q})


@pytest.mark.parametrize("tile", [(16, 64), (32, 48)])  # the second leaves cut tiles
def test_fp8_in_tiles(tile: tuple[int, int], tmp_path: Path) -> None:
    q, shape = floats8(), (-(-N // tile[0]), -(-K // tile[1]))
    s = scales(*shape).float()
    settings = {"quant_method": "fp8", "weight_block_size": list(tile)}
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.weight_scale_inv": s})
    spread = s.repeat_interleave(tile[0], 0)[:N].repeat_interleave(tile[1], 1)[:, :K]
    check(container, q.float() * spread, bits=None)
    wrong = {NAME: q, f"{STEM}.weight_scale_inv": s[:, :1].contiguous()}
    with pytest.raises(BadModel, match=r"the scale of .*has shape"):
        opened(tmp_path, settings, wrong).tensor(NAME, torch.float32)


def test_fp8_with_one_scale_and_with_one_for_each_row(tmp_path: Path) -> None:
    q, one, rows = floats8(), torch.tensor(0.25), scales(N, 1).float()
    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.weight_scale_inv": one})
    check(container, q.float() * 0.25, bits=None)
    settings = {"quant_method": "fbgemm_fp8"}
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.weight_scale": rows})
    check(container, q.float() * rows, bits=None)


def test_mxfp4_stacks_of_experts(tmp_path: Path) -> None:
    experts, stack = 3, "model.layers.0.mlp.experts.gate_up_proj"
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    q = codes(16, experts, N, K)
    exponents = codes(8, experts, N, K // 32) + 120
    pairs = q.view(experts, N, K // 32, 16, 2)
    tensors = {
        f"{stack}_blocks": (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8),
        f"{stack}_scales": exponents.to(torch.uint8),
    }
    container = opened(tmp_path, {"quant_method": "mxfp4"}, tensors)
    factor = torch.exp2(exponents.float() - 127).repeat_interleave(32, -1)
    wanted = (values[q] * factor).transpose(1, 2)  # experts, inputs, outputs
    assert torch.equal(container.tensor(stack, torch.float32), wanted)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(nested: bool, tmp_path: Path) -> None:
    q, size, count = codes(16, N, K), 64, N * K // 64
    table = torch.linspace(-1, 1, 16)
    pairs = q.view(-1, 2)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "shape": [N, K]}
    peaks = torch.rand(count, generator=rng(2)) + 0.1
    tensors = {
        NAME: ((pairs[:, 0] << 4) | pairs[:, 1]).to(torch.uint8).view(-1, 1),  # the high one first
        f"{NAME}.quant_map": table,
        f"{NAME}.absmax": peaks,
    }
    if nested:
        inner, outer = torch.linspace(-1, 1, 256), torch.rand(-(-count // 32), generator=rng(4))
        small = codes(256, count)
        state |= {"nested_blocksize": 32, "nested_offset": 0.5}
        peaks = inner[small] * outer.repeat_interleave(32)[:count] + 0.5
        tensors |= {
            f"{NAME}.absmax": small.to(torch.uint8),
            f"{NAME}.nested_quant_map": inner,
            f"{NAME}.nested_absmax": outer,
        }
    text = json.dumps(state).encode()
    tensors[f"{NAME}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    wanted = table[q] * peaks.repeat_interleave(size).view(N, K)
    check(opened(tmp_path, settings, tensors), wanted, bits=None)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    q, peaks = (codes(255, N, K) - 127).to(torch.int8), scales(N).float() * 100
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    container = opened(tmp_path, settings, {NAME: q, f"{STEM}.SCB": peaks})
    check(container, q * (peaks / 127).unsqueeze(1), bits=8)


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx(bits: int, tmp_path: Path) -> None:
    q, s = codes(1 << bits, N, K), scales(N, K // GROUP)
    b = -scales(N, K // GROUP) * 8
    tensors = {
        NAME: words(q, bits).view(torch.uint32),
        f"{STEM}.scales": s,
        f"{STEM}.biases": b,
    }
    settings = {"bits": bits, "group_size": GROUP}
    container = opened(tmp_path, settings, tensors)
    check(container, q * by_group(s) + by_group(b), bits=4 if bits == 4 else None)
    own = {"bits": 2, "group_size": 64, STEM: settings}
    check(opened(tmp_path, own, tensors), q * by_group(s) + by_group(b), 4 if bits == 4 else None)


def test_what_is_not_quantised_beside_it_stays_as_it_is(tmp_path: Path) -> None:
    norm = torch.rand(K)
    tensors = {
        "model.norm.weight": norm,
        NAME: floats8(),
        f"{STEM}.weight_scale_inv": norm[:1].clone(),
    }
    container = opened(tmp_path, {"quant_method": "fp8"}, tensors)
    assert torch.equal(container.tensor("model.norm.weight", torch.float32), norm)
    assert container.blocks("model.norm.weight") is None
    with pytest.raises(BadModel, match=r"no tensor model\.other"):
        container.tensor("model.other", torch.float32)


def test_an_unknown_method_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantised by hqq .*awq.*gptq.*mxfp4"):
        opened(tmp_path, {"quant_method": "hqq"}, {NAME: floats8()})
    assert quantization.unsupported({}) == ""


@pytest.mark.parametrize(
    ("settings", "damage", "says"),
    [
        ({"quant_method": "gptq", "bits": 3}, {}, "GPTQ with 3 bits is not supported"),
        ({"quant_method": "gptq", "bits": "x"}, {}, "bits that is no number"),
        ({"quant_method": "awq", "bits": 8}, {}, "AWQ with 8 bits is not supported"),
        (
            {"quant_method": "gptq", "bits": 4},
            {f"{STEM}.g_idx": lambda: torch.full((K,), 99, dtype=torch.int32)},
            "g_idx does not fit",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            {f"{STEM}.scales": lambda: torch.ones(4, 5).half()},
            r"scales has shape \(4, 5\), \(4, 48\) expected",
        ),
    ],
)
def test_damage_is_named(
    settings: dict[str, Any],
    damage: dict[str, Callable[[], Tensor]],
    says: str,
    tmp_path: Path,
) -> None:
    tensors = {
        f"{STEM}.qweight": words(codes(16, N, K), 4).t().contiguous(),
        f"{STEM}.qzeros": words(codes(16, K // GROUP, N), 4),
        f"{STEM}.scales": scales(K // GROUP, N),
        **{name: make() for name, make in damage.items()},
    }
    with pytest.raises((BadModel, UnsupportedModel), match=says):
        opened(tmp_path, settings, tensors).tensor(NAME, torch.float32)
