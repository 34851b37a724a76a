"""The operations of a compiled step, and the buffers they name; kernels.cpu_program runs them.

A `Network` is what was loaded, as flags and packed weights. A `Program` is the list of operations
that computes it, for steps of up to so many rows and positions. Operations name buffers by address;
when a step is larger than the program, it is written anew.

What varies between families is in an operation's fields, not in other operations: where norms
stand, which activation, which layers see a window or know no positions, caps and scales.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_step
from ..kernels.cpu_launch import Launcher
from ..kernels.cpu_pack import PackedMatrix
from ..layers.rotary import Rotary
from .config import LayerConfig, ModelConfig
from .decoder import LayerCache, StepInputs

ITEMS_PER_THREAD = 8  # fewer, and one thread's last item is a long wait for the others
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # as GATE numbers them


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix and what is added to its product."""

    matrix: PackedMatrix
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer. Norms are float32; those that a family does not have are None."""

    config: LayerConfig
    attention_norm: Tensor | None
    attention_out_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_out_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class Network:
    """All that a program reads but the cache."""

    config: ModelConfig
    embedding: PackedMatrix
    layers: tuple[PackedLayer, ...]
    norm: Tensor
    head: PackedLinear


class Program:
    """The operations for steps of up to `num_rows` rows whose sequences have up to `num_positions`
    tokens, and the buffers they name."""

    def __init__(
        self,
        network: Network,
        launcher: Launcher,
        caches: Sequence[LayerCache],
        num_rows: int,
        num_positions: int,
    ) -> None:
        self.num_rows, self.num_positions = num_rows, num_positions
        config = network.config
        self._launcher = launcher
        shapes = [layer.config for layer in network.layers]
        mixed = config.num_heads * max(shape.head_dim for shape in shapes)
        qkv = max(layer.qkv.matrix.num_outputs for layer in network.layers)
        widest = max(config.hidden_size, config.intermediate_size, mixed)
        self._hidden = self._floats(config.hidden_size)
        self._normed = self._floats(config.hidden_size)
        self._attended = self._floats(config.hidden_size)
        self._answered = self._floats(config.hidden_size)
        self._qkv = self._floats(qkv)
        self._gate_up = self._floats(2 * config.intermediate_size)
        # a row: int8 or int16 for matrices of 4 and 8 bits, float32 for those of 16
        self._rows = torch.empty((num_rows, widest), dtype=torch.float32)
        self._scales = self._floats(widest // 16)
        self._max_kv_heads = max(shape.num_kv_heads for shape in shapes)
        self._piece_bytes = max(
            cpu_step.piece_bytes(config.num_heads // shape.num_kv_heads, shape.head_dim)
            for shape in shapes
        )
        self._pieces = torch.empty(0, dtype=torch.uint8)
        self._rotaries: dict[tuple[Any, ...], Rotary] = {}  # by what makes them equal
        self._ops: list[list[int]] = []
        self._write(network, caches)
        self._table = np.zeros((len(self._ops), cpu_step.OP_FIELDS), dtype=np.int64)
        for row, op in zip(self._table, self._ops, strict=True):
            row[: len(op)] = op
        # a thread's counters lie in lines of their own, and the cells that all write to behind them
        width = (len(self._ops) + 15) // 8 * 8
        self._counters = np.zeros((launcher.max_threads + 1, width + 32), dtype=np.int64)
        self._header = self._make_header(network)
        self._keep = (network, caches)

    def holds(self, num_rows: int, num_positions: int) -> bool:
        """A step of this size can run."""
        return num_rows <= self.num_rows and num_positions <= self.num_positions

    def run(self, inputs: StepInputs, logits: Tensor, best: Any) -> None:
        """The logits are written, and to `best`, int64, the lowest id of each row's largest; -1
        where they are unusable."""
        header = self._header
        views = (inputs, *inputs.others)
        tiles = np.stack(_tiles(views, cpu_step.QUERY_TILE))
        blocks = inputs.block_ids
        if inputs.others:
            blocks = torch.cat([view.block_ids for view in views])
        self._counters.fill(0)
        self._table[0, 1] = inputs.token_ids.data_ptr()
        self._table[self._head, 6] = logits.data_ptr()
        self._table[self._head + 1 :, 1] = logits.data_ptr()
        self._table[-1, 3] = best.ctypes.data
        header[cpu_step.NUM_ROWS] = len(inputs.token_ids)
        header[cpu_step.NUM_LOGIT_ROWS] = len(inputs.logit_rows)
        # from the last norm on all is skipped where no row wants logits
        header[cpu_step.NUM_OPS] = len(self._ops) if len(inputs.logit_rows) else self._head - 1
        header[cpu_step.LOGIT_ROWS] = inputs.logit_rows.data_ptr()
        header[cpu_step.POSITIONS] = inputs.positions.data_ptr()
        header[cpu_step.BLOCKS] = blocks.data_ptr()
        header[cpu_step.NUM_TILES] = tiles.shape[1]
        header[cpu_step.TILES] = tiles.ctypes.data
        header[cpu_step.NUM_PIECES] = self._num_pieces(inputs, tiles.shape[1])
        self._launcher.run(header)

    def _num_pieces(self, inputs: StepInputs, num_tiles: int) -> int:
        """Into how many pieces the threads cut a sequence's keys; 0: no thread would be idle."""
        threads = self._launcher.num_threads
        num_items = num_tiles * self._max_kv_heads
        longest = max(span.seq_len for span in inputs.spans)
        pieces = -(-longest // (cpu_step.BLOCK_SIZE * cpu_step.PIECE_BLOCKS))
        if threads == 1 or pieces == 1 or num_items >= ITEMS_PER_THREAD * threads:
            return 0
        size = num_items * pieces * self._piece_bytes
        if size > len(self._pieces):
            self._pieces = torch.empty(size, dtype=torch.uint8)
        self._header[cpu_step.PIECES] = self._pieces.data_ptr()
        return int(pieces)

    def _floats(self, width: int) -> Tensor:
        return torch.empty((self.num_rows, width), dtype=torch.float32)

    # ------------------------------------------------------------------------- the operations

    def _write(self, network: Network, caches: Sequence[LayerCache]) -> None:
        config, table = network.config, network.embedding
        scale = float_bits(config.embedding_scale)
        shape = (table.num_inputs, table.bits)
        self._add(cpu_step.EMBED, 0, table.data, *shape, self._hidden, scale)
        deltas: tuple[Tensor, ...] = ()
        out_norm: Tensor | None = None
        for layer, cache in zip(network.layers, caches, strict=True):
            self._add_norm(config, layer.attention_norm, layer.qkv, deltas, out_norm)
            self._add_attention(config, layer, cache)
            if config.norms == "parallel":
                self._add_rows(layer.gate_up)
                deltas = (self._answered, self._attended)
            else:
                read = (self._attended,)
                self._add_norm(
                    config, layer.mlp_norm, layer.gate_up, read, layer.attention_out_norm
                )
                deltas = (self._answered,)
            self._add_mlp(config, layer)
            out_norm = layer.mlp_out_norm
        self._add_norm(config, network.norm, network.head, deltas, out_norm, is_last=True)
        self._head = len(self._ops)
        self._add_matmul(network.head, None, is_last=True)
        if config.logit_scale != 1 or config.logit_softcap is not None:
            cap = float_bits(config.logit_softcap or 0.0)
            factor = float_bits(config.logit_scale)
            self._add(cpu_step.CAP, 0, config.vocab_size, 0, factor, cap)
        self._add(cpu_step.BEST, 0, config.vocab_size, 0)
        self._name_next_attention()

    def _name_next_attention(self) -> None:
        """A product knows which attention follows, to fetch for it; the last ones know none."""
        follows = 0
        for number, op in reversed(list(enumerate(self._ops))):
            if op[0] == cpu_step.ATTEND:
                follows = number
            elif op[0] == cpu_step.MATMUL:
                op.append(follows)

    def _add(self, kind: int, *fields: int | Tensor | None) -> None:
        """Tensors become their addresses, None becomes 0."""
        self._ops.append([kind, *(_address(field) for field in fields)])

    def _add_norm(
        self,
        config: ModelConfig,
        weight: Tensor | None,
        reader: PackedLinear,
        deltas: tuple[Tensor, ...],
        out_norm: Tensor | None,
        is_last: bool = False,
    ) -> None:
        """The branches' answers join the residual; its norm is rounded for the matrix that reads
        it."""
        first, second = (*deltas, None, None)[:2]
        residual_scale = config.residual_scale
        self._add(
            cpu_step.NORM,
            self._hidden,
            first,
            weight,
            config.hidden_size,
            reader.matrix.bits,
            self._rows,
            self._scales,
            int(is_last),
            self._normed if config.norms == "parallel" else None,
            out_norm,
            float_bits(residual_scale) if residual_scale != 1 else 0,
            int(config.norm_kind == "layer"),
            second,
        )

    def _add_rows(self, reader: PackedLinear) -> None:
        """What was normed last is rounded for another matrix."""
        width, bits = self._normed.shape[1], reader.matrix.bits
        self._add(cpu_step.QUANTIZE, self._normed, width, bits, self._rows, self._scales)

    def _add_attention(self, config: ModelConfig, layer: PackedLayer, cache: LayerCache) -> None:
        shape = layer.config
        self._add_matmul(layer.qkv, self._qkv)
        rotary = self._rotary(config, shape)
        sizes = (config.num_heads, shape.num_kv_heads, shape.head_dim, _block_stride(cache))
        self._add(
            cpu_step.ROPE,
            self._qkv,
            cache.keys,
            cache.values,
            layer.query_norm,
            layer.key_norm,
            None if rotary is None else rotary.cos,
            None if rotary is None else rotary.sin,
            *sizes,
            cache.group,
            int(config.qk_norm_full),
            0 if rotary is None else rotary.cos.shape[1],
            int(rotary is not None and rotary.is_interleaved),
        )
        attend = (
            self._qkv,
            cache.keys,
            cache.values,
            self._rows,
            self._scales,
            layer.output.matrix.bits,
            shape.window or 0,
            *sizes,
            float_bits(config.attention_scale or shape.head_dim**-0.5),
            self._piece_bytes,
            cache.group,
            float_bits(config.attention_softcap or 0.0),
        )
        self._add(cpu_step.ATTEND, *attend)
        self._add(cpu_step.MERGE, *attend)
        self._add_matmul(layer.output, self._attended)

    def _rotary(self, config: ModelConfig, layer: LayerConfig) -> Rotary | None:
        """Layers that rotate alike share the angles of all positions."""
        if layer.rope is None:
            return None
        frequencies, magnitude = config.rope_of(layer)
        alike = (tuple(frequencies), magnitude, layer.rope.is_interleaved)
        if alike not in self._rotaries:
            self._rotaries[alike] = Rotary(
                frequencies, self.num_positions, magnitude, layer.rope.is_interleaved
            )
        return self._rotaries[alike]

    def _add_mlp(self, config: ModelConfig, layer: PackedLayer) -> None:
        self._add_matmul(layer.gate_up, self._gate_up)
        self._add(
            cpu_step.GATE,
            self._gate_up,
            config.intermediate_size,
            layer.down.matrix.bits,
            self._rows,
            self._scales,
            ACTIVATIONS[config.activation],
        )
        self._add_matmul(layer.down, self._answered)

    def _add_matmul(self, linear: PackedLinear, out: Tensor | None, is_last: bool = False) -> None:
        matrix = linear.matrix
        self._add(
            cpu_step.MATMUL,
            self._rows,
            self._scales,
            matrix.data,
            matrix.num_inputs,
            matrix.num_outputs,
            out,
            4 * matrix.num_outputs,
            matrix.bits,
            linear.bias,
            int(is_last),
        )

    def _make_header(self, network: Network) -> Any:
        threads = self._launcher.max_threads
        header = np.zeros(cpu_step.HEADER_FIELDS, dtype=np.int64)
        num_heads = network.config.num_heads
        sizes = [
            cpu_step.scratch_bytes(num_heads // layer.config.num_kv_heads, layer.config.head_dim)
            for layer in network.layers
        ]
        for layer in network.layers:
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            sizes += [cpu_step.unpacked_bytes(linear.matrix.num_inputs) for linear in linears]
        scratch = cpu_step.scratch_stride(sizes)
        self._scratch = torch.empty(scratch * threads, dtype=torch.uint8)
        arrivals = self._counters[-1].ctypes.data
        header[cpu_step.OPS] = self._table.ctypes.data
        header[cpu_step.COUNTERS] = self._counters.ctypes.data
        header[cpu_step.COUNTER_STRIDE] = self._counters.strides[0]
        header[cpu_step.ARRIVALS] = arrivals
        header[cpu_step.THREADS_SEEN] = arrivals + 8 * 16
        header[cpu_step.EPS] = float_bits(network.config.rms_norm_eps)
        header[cpu_step.SCRATCH] = self._scratch.data_ptr()
        header[cpu_step.SCRATCH_STRIDE] = scratch
        return header


class Thin:
    """One operation over rows of logits: which tokens can win the draw."""

    def __init__(self, launcher: Launcher, vocab_size: int) -> None:
        self._launcher, self._vocab_size = launcher, vocab_size
        self._table = np.zeros(cpu_step.OP_FIELDS, dtype=np.int64)
        self._table[:3] = (cpu_step.THIN, 0, vocab_size)
        self._cells = np.zeros(40, dtype=np.int64)  # counter, arrivals, threads: lines of their own
        header = self._header = np.zeros(cpu_step.HEADER_FIELDS, dtype=np.int64)
        header[cpu_step.NUM_OPS] = 1
        header[cpu_step.OPS] = self._table.ctypes.data
        header[cpu_step.COUNTERS] = self._cells.ctypes.data
        header[cpu_step.ARRIVALS] = self._cells.ctypes.data + 128
        header[cpu_step.THREADS_SEEN] = self._cells.ctypes.data + 256

    def run(self, logits: Tensor, requests: Sequence[tuple[int, int, float]]) -> list[Any]:
        """See CompiledDecoder.thin."""
        asked = np.zeros((len(requests), cpu_step.REQUEST_FIELDS), dtype=np.int64)
        for at, (row, base, temperature) in enumerate(requests):
            signed = base - (1 << 64) if base >> 63 else base
            asked[at, :3] = (row, signed, float_bits(1 / temperature))
        left = np.empty((len(requests), cpu_step.MOST_LEFT + 1), dtype=np.int64)
        self._cells.fill(0)
        self._table[1] = logits.data_ptr()
        self._table[3:5] = (asked.ctypes.data, left.ctypes.data)
        self._header[cpu_step.NUM_ROWS] = len(requests)
        self._launcher.run(self._header)
        counts = left[:, 0].tolist()
        return [
            ids[1 : count + 1] if count <= cpu_step.MOST_LEFT else None
            for ids, count in zip(left, counts, strict=True)
        ]


def _address(field: int | Tensor | None) -> int:
    if field is None:
        return 0
    return field.data_ptr() if isinstance(field, Tensor) else field


def _block_stride(cache: LayerCache) -> int:
    return cache.keys.stride(0) * cache.keys.element_size()


def float_bits(value: float) -> int:
    """The float32 as the integer that the compiled code reads; 0.0 is 0."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _tiles(views: Sequence[StepInputs], size: int) -> list[Any]:
    """Query tiles over the blocks of each group of layers, the longest look-back first, so that no
    thread ends with a long one alone."""
    tiles = []
    for number, span in enumerate(views[0].spans):
        tables = [view.spans[number].block_ids.data_ptr() for view in views]
        first = span.seq_len - span.num_tokens
        for begin in range(0, span.num_tokens, size):
            count = min(size, span.num_tokens - begin)
            tiles.append((span.start + begin, count, first + begin, tables))
    tiles.sort(key=lambda tile: tile[1] * (tile[1] + tile[2]), reverse=True)
    return [
        np.array([(*tile[:3], tile[3][group]) for tile in tiles], dtype=np.int64)
        for group in range(len(views))
    ]
