"""Quantised safetensors: one internal form for all their layouts.

    w[n, k] = q[n, k] · scale[n, group of k] (+ offset[n, group of k])

A layout knows which stored tensors belong to a weight and makes `Groups` of them. Where groups are
whole blocks of 32 and codes have 4 or 8 bits, the integers go into the matrix products as they are
(`Groups.blocks`); else, and for codes that are floats, the weight is dequantised (`dense`).

Sources: the checkpoints' own settings (config.json), and the formats' descriptions: AutoAWQ,
AutoGPTQ and GPTQModel, compressed-tensors, bitsandbytes, MLX, OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...registry.formats import quantization
from .config import BadModel, UnsupportedModel
from .dequantize import FP4_DOUBLED, QuantBlocks

BLOCK = 32
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

Read = Callable[[str], Tensor]  # a stored tensor by its name, in its own dtype


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix [N, K] as integers. Consecutive inputs share a scale, unless `group_of` says which.

    quants uint8, or int8 where they are signed; scale, offset float32 [N, K / group].
    """

    quants: Tensor
    scale: Tensor
    offset: Tensor | None = None
    group_of: Tensor | None = None  # [K]

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        scale = self._spread(self.scale)
        dense = self.quants.float() * scale
        return dense if self.offset is None else dense + self._spread(self.offset)

    def _spread(self, values: Tensor) -> Tensor:
        if self.group_of is not None:
            return values[:, self.group_of]
        return values.repeat_interleave(self.quants.shape[1] // values.shape[1], dim=1)

    def blocks(self) -> QuantBlocks | None:
        """The integers in blocks of 32 inputs; None if they do not fit the matrix products."""
        rows, columns = self.quants.shape
        group = columns // self.scale.shape[1]
        if self.group_of is not None or columns % BLOCK or group % BLOCK:
            return None
        is_signed = self.quants.dtype == torch.int8
        offset = self.offset
        if is_signed and offset is not None:
            return None
        if not is_signed:
            if int(self.quants.max()) > 15:
                return None  # 8-bit codes have no offset there
            offset = torch.zeros_like(self.scale) if offset is None else offset
        halves = [None if part is None else part.half() for part in (self.scale, offset)]
        if not all(half is None or bool(torch.isfinite(half).all()) for half in halves):
            return None
        scale, shift = (
            None if half is None else half.repeat_interleave(group // BLOCK, dim=1)
            for half in halves
        )
        assert scale is not None
        return QuantBlocks(8 if is_signed else 4, self.quants.view(rows, -1, BLOCK), scale, shift)


class Layout(ABC):
    """How one method stores its weights. `names` are all names that are stored."""

    method = ""

    def __init__(self, settings: Mapping[str, Any], names: frozenset[str], read: Read) -> None:
        self.settings = settings
        self.names = names
        self.read = read

    @abstractmethod
    def weights(self) -> frozenset[str]:
        """The names of the weights that this layout makes, those of unquantised ones not among."""

    def groups(self, name: str) -> Groups | None:
        """The weight as integers, or None if its codes are no integers."""
        return None

    def dense(self, name: str) -> Tensor:
        """The weight in float32."""
        groups = self.groups(name)
        assert groups is not None
        return groups.dense()

    def _with(self, suffix: str, becomes: str = ".weight") -> frozenset[str]:
        """What the names with this ending stand for."""
        found = (name for name in self.names if name.endswith(suffix))
        return frozenset(name.removesuffix(suffix) + becomes for name in found)

    def _optional(self, name: str) -> Tensor | None:
        return self.read(name) if name in self.names else None

    def _number(self, key: str, default: int) -> int:
        try:
            return int(self.settings.get(key, default))
        except (TypeError, ValueError) as error:
            raise BadModel(f"quantization_config has a {key} that is no number") from error


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """32-bit words [..., n] to uint8 [..., n · 32 / bits]; `order`: where code i lies in a word."""
    places = order or tuple(range(32 // bits))
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    codes = (words.view(torch.int32).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def _expect(name: str, found: Tensor, *shape: int) -> Tensor:
    if tuple(found.shape) != shape:
        raise BadModel(f"{name} has shape {tuple(found.shape)}, {shape} expected")
    return found


def _supported_bits(method: str, bits: int, supported: tuple[int, ...]) -> int:
    if bits not in supported:
        listed = ", ".join(map(str, supported))
        raise UnsupportedModel(f"{method} with {bits} bits is not supported; supported: {listed}")
    return bits


class _AWQ(Layout):
    """qweight int32 [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]: (q − z) · s."""

    method = "awq"
    _ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def __init__(self, settings: Mapping[str, Any], names: frozenset[str], read: Read) -> None:
        super().__init__(settings, names, read)
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnsupportedModel(f"AWQ in the form {version} is not supported; gemm is")
        _supported_bits("AWQ", self._number("bits", 4), (4,))

    def weights(self) -> frozenset[str]:
        return self._with(".qweight")

    def groups(self, name: str) -> Groups:
        stem = name.removesuffix(".weight")
        scales = self.read(f"{stem}.scales").float().t().contiguous()
        quants = unpack_words(self.read(f"{stem}.qweight"), 4, self._ORDER).t().contiguous()
        zeros = unpack_words(self.read(f"{stem}.qzeros"), 4, self._ORDER).t()
        _expect(f"{stem}.qzeros", zeros, *scales.shape)
        if quants.shape[0] != scales.shape[0] or quants.shape[1] % scales.shape[1]:
            raise BadModel(f"{stem}.scales do not fit {stem}.qweight")
        return Groups(quants, scales, -zeros.float() * scales)


class _GPTQ(Layout):
    """qweight int32 [K · bits / 32, N] packed along K, qzeros [groups, N · bits / 32].

    Version 1 stores each zero less one. With `desc_act` the inputs of a group are not neighbours:
    g_idx [K] says which group each is of.
    """

    method = "gptq"

    def weights(self) -> frozenset[str]:
        return self._with(".qweight")

    def groups(self, name: str) -> Groups:
        stem = name.removesuffix(".weight")
        packed, scales = self.read(f"{stem}.qweight"), self.read(f"{stem}.scales").float()
        g_idx = self._optional(f"{stem}.g_idx")
        bits = self._number("bits", 4)
        if g_idx is not None:
            bits = packed.shape[0] * 32 // len(g_idx)  # `dynamic` settings may differ by module
        _supported_bits("GPTQ", bits, (2, 4, 8))
        quants = unpack_words(packed.t().contiguous(), bits)
        _expect(f"{stem}.scales", scales, scales.shape[0], quants.shape[0])
        zeros = unpack_words(self.read(f"{stem}.qzeros"), bits).float()
        _expect(f"{stem}.qzeros", zeros, *scales.shape)
        is_v2 = str(self.settings.get("checkpoint_format", "gptq")) == "gptq_v2"
        offset = -(zeros if is_v2 else zeros + 1) * scales
        scale, offset = scales.t().contiguous(), offset.t().contiguous()
        return _recentred(
            Groups(quants, scale, offset, self._irregular(g_idx, quants.shape[1], scale.shape[1]))
        )

    @staticmethod
    def _irregular(g_idx: Tensor | None, columns: int, num_groups: int) -> Tensor | None:
        """None where every group is of neighbours."""
        if g_idx is None:
            return None
        found = g_idx.to(torch.int64)
        if len(found) != columns or int(found.max()) >= num_groups or int(found.min()) < 0:
            raise BadModel("a g_idx does not fit its weight")
        is_plain = columns % num_groups == 0 and torch.equal(
            found, torch.arange(columns) // (columns // num_groups)
        )
        return None if is_plain else found


def _recentred(groups: Groups) -> Groups:
    """8-bit codes around 128 as signed ones around 0, which then need no offset."""
    offset = groups.offset
    if groups.quants.dtype != torch.uint8 or offset is None or int(groups.quants.max()) <= 15:
        return groups
    if not torch.equal(offset, -128 * groups.scale):
        return groups
    signed = (groups.quants.to(torch.int16) - 128).to(torch.int8)
    return Groups(signed, groups.scale, None, groups.group_of)


class _CompressedTensors(Layout):
    """Of the formats: pack-quantized (4 or 8 bits), int-, float- and naive-quantized."""

    method = "compressed-tensors"
    _FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")

    def __init__(self, settings: Mapping[str, Any], names: frozenset[str], read: Read) -> None:
        super().__init__(settings, names, read)
        kinds = {str(settings.get("format", "dense"))}
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise BadModel("quantization_config has config_groups that are no object")
        kinds |= {str(each["format"]) for each in groups.values() if each.get("format")}
        kinds.discard("mixed-precision")
        if unknown := kinds - set(self._FORMATS):
            raise UnsupportedModel(
                f"compressed-tensors in the form {min(unknown)} are not supported; supported are "
                f"{', '.join(self._FORMATS)}"
            )
        weights = [each.get("weights") or {} for each in groups.values()]
        self._bits = {int(each.get("num_bits", 4)) for each in weights}
        tiles = [each["block_structure"] for each in weights if each.get("block_structure")]
        self._tile = tiles[0] if tiles else None

    def weights(self) -> frozenset[str]:
        scaled = self._with(".weight_scale")
        return self._with(".weight_packed") | frozenset(scaled & self.names)

    def groups(self, name: str) -> Groups | None:
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_packed" in self.names:
            return self._packed(stem)
        stored = self.read(name)
        if stored.dtype != torch.int8:
            return None
        zero = self._optional(f"{stem}.weight_zero_point")
        return self._scaled(stem, stored, None if zero is None else zero.float())

    def _packed(self, stem: str) -> Groups:
        rows, columns = (int(size) for size in self.read(f"{stem}.weight_shape"))
        words = self.read(f"{stem}.weight_packed")
        bits = _supported_bits(self.method, self._bits_of(words, columns), (4, 8))
        codes = unpack_words(words, bits)[:, :columns].contiguous()
        _expect(f"{stem}.weight_packed", codes, rows, columns)
        middle = 1 << (bits - 1)  # what was added to make the codes unsigned
        packed_zero = self._optional(f"{stem}.weight_zero_point")
        zero = None
        if packed_zero is not None:  # packed along the outputs
            zero = unpack_words(packed_zero.t().contiguous(), bits).t()[:rows].float() - middle
        if bits == 8:
            return self._scaled(stem, (codes.to(torch.int16) - 128).to(torch.int8), zero)
        return self._scaled(stem, codes, middle if zero is None else zero + middle)

    def _bits_of(self, words: Tensor, columns: int) -> int:
        """The one among the settings' that the row's length fits."""
        fitting = [bits for bits in self._bits if -(-columns * bits // 32) == words.shape[1]]
        if not fitting:
            raise BadModel(f"weight_packed has {words.shape[1]} words for {columns} inputs")
        return fitting[0]

    def _scaled(self, stem: str, quants: Tensor, zero: Tensor | int | None) -> Groups:
        scale = _by_row(f"{stem}.weight_scale", self.read(f"{stem}.weight_scale"), quants)
        g_idx = self._optional(f"{stem}.weight_g_idx")
        group_of = _GPTQ._irregular(g_idx, quants.shape[1], scale.shape[1])
        if zero is None:
            return Groups(quants, scale, None, group_of)
        offset = -(zero.reshape(len(zero), -1) if isinstance(zero, Tensor) else zero) * scale
        return Groups(quants, scale, offset, group_of)

    def dense(self, name: str) -> Tensor:
        groups = self.groups(name)
        if groups is not None:
            return groups.dense()
        return _scaled_float(name, self.read(name), self.read(f"{name}_scale"), self._tile)


def _by_row(name: str, stored: Tensor, quants: Tensor) -> Tensor:
    """Scales of a tensor, of its rows or of its groups, as float32 [N, groups]."""
    rows, columns = quants.shape
    flat = stored.float().reshape(-1)
    if flat.numel() == 1:
        return flat.view(1, 1).expand(rows, 1).contiguous()
    if flat.numel() % rows or columns % (flat.numel() // rows):
        raise BadModel(f"{name} has shape {tuple(stored.shape)}, which does not fit {rows} rows")
    return flat.view(rows, -1)


def _scaled_float(name: str, stored: Tensor, scale: Tensor, tile: Any = None) -> Tensor:
    """8-bit floats times the scale of the tensor, of each row, of groups of a row, or of each tile
    (tall, wide), the last ones of which may be cut."""
    if stored.dtype not in FP8_TYPES or stored.dim() != 2:
        raise BadModel(f"{name} is {stored.dtype}, a matrix of 8-bit floats is expected")
    rows, columns = stored.shape
    scale = _scale_floats(scale)
    if scale.numel() == 1:
        return stored.float() * scale.reshape(())
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if tile is None or scale.shape[0] == rows:
        tile = (1, columns // scale.shape[1])
    tall, wide = (max(int(each), 1) for each in tile)
    _expect(f"the scale of {name}", scale, -(-rows // tall), -(-columns // wide))
    spread = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return stored.float() * spread


def _scale_floats(scale: Tensor) -> Tensor:
    """Scales may be bare exponents (E8M0)."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


class _FP8(Layout):
    """weight e4m3 [N, K], weight_scale_inv of each tile of `weight_block_size`, or one for all."""

    method = "fp8"

    def weights(self) -> frozenset[str]:
        tiles, rows = self._with(".weight_scale_inv"), self._with(".weight_scale")
        return frozenset((tiles | rows) & self.names)

    def dense(self, name: str) -> Tensor:
        scale = self._optional(f"{name}_scale_inv")
        if scale is None:
            return _scaled_float(name, self.read(name), self.read(f"{name}_scale"))
        return _scaled_float(name, self.read(name), scale, self.settings.get("weight_block_size"))


class _FBGEMM(_FP8):
    """weight e4m3 [N, K], weight_scale [N, 1]."""

    method = "fbgemm_fp8"


class _MXFP4(Layout):
    """Stacks of experts: X_blocks uint8 [E, N, K / 32, 16], X_scales uint8 [E, N, K / 32].

    Neighbours share a byte, the first one low. As the unquantised stack would be: [E, K, N].
    """

    method = "mxfp4"

    def weights(self) -> frozenset[str]:
        return self._with("_blocks", becomes="")

    def dense(self, name: str) -> Tensor:
        blocks, scales = self.read(f"{name}_blocks"), self.read(f"{name}_scales")
        _expect(f"{name}_scales", scales, *blocks.shape[:-1])
        values = torch.tensor(FP4_DOUBLED, dtype=torch.float32) / 2
        pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        dense = values[pairs.int()] * torch.exp2(scales.float() - 127).unsqueeze(-1)
        return dense.flatten(-2).transpose(1, 2).contiguous()


class _BitsAndBytes(Layout):
    """4 bit: codes into a table, the high nibble first, times a largest magnitude of each block.
    8 bit: int8 [N, K] times SCB [N] / 127."""

    method = "bitsandbytes"

    def __init__(self, settings: Mapping[str, Any], names: frozenset[str], read: Read) -> None:
        super().__init__(settings, names, read)
        self._states = {
            name.split(".quant_state.")[0]: name for name in names if ".quant_state." in name
        }

    def weights(self) -> frozenset[str]:
        return frozenset(self._states) | frozenset(self._with(".SCB") & self.names)

    def groups(self, name: str) -> Groups | None:
        if name in self._states:
            return None
        stored, scale = self.read(name), self.read(f"{name.removesuffix('.weight')}.SCB")
        if stored.dtype != torch.int8 or scale.numel() != len(stored):
            raise BadModel(f"{name} and its SCB do not fit together")
        return Groups(stored, scale.float().view(-1, 1) / 127)

    def dense(self, name: str) -> Tensor:
        if name not in self._states:
            return super().dense(name)
        state = self._state(name)
        codes = self.read(name).flatten()
        nibbles = torch.stack((codes >> 4, codes & 15), dim=-1).flatten()
        shape, size = [int(each) for each in state["shape"]], int(state["blocksize"])
        peaks = self._peaks(name, state)
        if nibbles.numel() < shape[0] * shape[1] or len(peaks) * size < shape[0] * shape[1]:
            raise BadModel(f"{name} is shorter than its quant_state says")
        table = self.read(f"{name}.quant_map").float()
        values = table[nibbles[: shape[0] * shape[1]].int()]
        return (values * peaks.repeat_interleave(size)[: len(values)]).view(shape)

    def _state(self, name: str) -> Mapping[str, Any]:
        try:
            state = json.loads(bytes(self.read(self._states[name]).tolist()))
            shape, size = state["shape"], state["blocksize"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadModel(f"{self._states[name]} cannot be read: {error}") from error
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(size, int):
            raise BadModel(f"{self._states[name]} has no shape of a matrix")
        found: Mapping[str, Any] = state
        return found

    def _peaks(self, name: str, state: Mapping[str, Any]) -> Tensor:
        """The largest magnitude of each block; these may be quantised themselves."""
        peaks = self.read(f"{name}.absmax")
        if f"{name}.nested_absmax" not in self.names:
            return peaks.float()
        table = self.read(f"{name}.nested_quant_map").float()
        outer = self.read(f"{name}.nested_absmax").float()
        spread = outer.repeat_interleave(int(state.get("nested_blocksize", 256)))[: len(peaks)]
        return table[peaks.int()] * spread + float(state.get("nested_offset", 0.0))


class _MLX(Layout):
    """weight uint32 packed along K, scales and biases [N, K / group]: w = q · s + b."""

    method = "mlx"

    def weights(self) -> frozenset[str]:
        return frozenset(self._with(".scales") & self.names)

    def groups(self, name: str) -> Groups:
        stem = name.removesuffix(".weight")
        bits, group = self._settings_of(stem)
        _supported_bits("MLX", bits, (2, 4, 8))
        quants = unpack_words(self.read(name), bits)
        rows, columns = quants.shape
        scales = _expect(f"{stem}.scales", self.read(f"{stem}.scales"), rows, columns // group)
        biases = _expect(f"{stem}.biases", self.read(f"{stem}.biases"), rows, columns // group)
        return _recentred(Groups(quants, scales.float(), biases.float()))

    def _settings_of(self, stem: str) -> tuple[int, int]:
        """Of the model, unless the module has its own."""
        own = self.settings.get(stem)
        merged = {**self.settings, **own} if isinstance(own, Mapping) else self.settings
        mode = merged.get("mode", "affine")
        if mode != "affine":
            raise UnsupportedModel(f"MLX in the mode {mode} is not supported; affine is")
        try:
            return int(merged["bits"]), int(merged["group_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadModel("config.json has no bits and group_size for MLX") from error


_LAYOUTS: dict[str, type[Layout]] = {
    layout.method: layout
    for layout in (_AWQ, _BitsAndBytes, _CompressedTensors, _FBGEMM, _FP8, _GPTQ, _MLX, _MXFP4)
}


def layout_of(config: Mapping[str, Any], names: frozenset[str], read: Read) -> Layout | None:
    """None if the model is not quantised. Raises UnsupportedModel with the supported methods."""
    refusal = quantization.unsupported(config)
    if refusal:
        raise UnsupportedModel(refusal)
    method = quantization.method_of(config)
    if not method:
        return None
    settings = config.get("quantization_config") or config.get("quantization") or {}
    return _LAYOUTS[method](settings, names, read)
