"""The decoder as one compiled program: same inputs and outputs as `Decoder`, other arithmetic.

Weights stay quantised (4 or 8 bit in groups of 32), a row's activations are rounded to int8 or
int16 per 32 before each product, everything between is float32, keys and values are bfloat16. A
row's result depends on its own sequence alone, to the bit.

The program's operations name buffers by address. Buffers grow with the largest step seen, and the
program is then written anew.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_pack
from ..kernels.cpu_launch import Launcher, why_not
from ..kernels.cpu_pack import PackedMatrix
from ..layers.rotary import Rotary
from .checkpoint import Checkpoint, QuantBlocks
from .config import BadModel, ModelConfig
from .decoder import LayerCache, StepInputs, frequencies_of

log = logging.getLogger("llmd.models")

KV_DTYPE = torch.bfloat16
ITEMS_PER_THREAD = 8  # fewer, and one thread's last item is a long wait for the others


def why_not_compiled(config: ModelConfig) -> str:
    """The reason why this model can't run as a compiled program here; empty if it can."""
    reason = why_not()
    if reason:
        return reason
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(width % cpu_pack.BLOCK for width in widths) or config.head_dim % 32:
        return f"widths {widths} and head size {config.head_dim} are not all multiples of 32"
    if config.vocab_size % cpu_pack.STRIP:
        return f"the vocabulary of {config.vocab_size} is not a multiple of {cpu_pack.STRIP}"
    return ""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear


@dataclass(frozen=True, slots=True)
class _Linear:
    matrix: PackedMatrix
    bias: Tensor | None


class CompiledDecoder:
    """A loaded network whose steps are single calls into compiled code.

    Raises BadModel if a tensor is missing or of another shape than the configuration says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        launcher: Launcher,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = KV_DTYPE
        self._launcher = launcher
        load = _Loader(checkpoint)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", torch.float16)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(load, index))
            progress((index + 1) / (config.num_layers + 1))
        self._norm = load.norm("model.norm")
        head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        self._head = load.linear((head,), config.vocab_size, config.hidden_size, False)
        self._rotary = Rotary(frequencies_of(checkpoint), config.context_length)
        self.weights_bytes = load.size_bytes + self._embedding.nbytes
        self.linear_layout = ", ".join(
            f"{count} × {bits} bit" for bits, count in sorted(load.matrices.items())
        )
        self._program: _Program | None = None
        self._logits = torch.empty((0, config.vocab_size), dtype=torch.float32)
        self._thin = _Thin(launcher, config.vocab_size)

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32. The next step writes over them."""
        num_rows, num_logits = len(inputs.token_ids), len(inputs.logit_rows)
        program = self._program
        if program is None or num_rows > program.capacity:
            program = self._program = _Program(self, caches, _rounded_up(num_rows))
        torch.index_select(self._embedding, 0, inputs.token_ids, out=program.embedded[:num_rows])
        program.hidden[:num_rows].copy_(program.embedded[:num_rows])
        if num_logits > len(self._logits):
            # kept from step to step: fresh memory of this size costs a page fault per 1,024 logits
            self._logits = torch.empty((num_logits, self.config.vocab_size), dtype=torch.float32)
        logits = self._logits[:num_logits]
        program.run(inputs, logits)
        return logits

    @property
    def best(self) -> Any:
        """int64 [num_logits] of the last step: the lowest id of the largest logit; -1 where the
        logits are unusable."""
        return self._program.best if self._program is not None else np.empty(0, np.int64)

    def rest(self) -> None:
        """Nothing runs: give the buffers back that grew with the largest step. The next step makes
        them again, in about a millisecond."""
        self._program = None
        self._logits = torch.empty((0, self.config.vocab_size), dtype=torch.float32)

    def thin(self, requests: Sequence[tuple[int, int, float]]) -> list[Any]:
        """For rows of the last step's logits (row, hash, temperature): the ids that can win.

        The hash is `sampler.noise_base`; an entry is None where too many are left.
        """
        return self._thin.run(self._logits, requests)

    # ------------------------------------------------------- what the program reads

    @property
    def launcher(self) -> Launcher:
        return self._launcher

    def parts(self) -> tuple[list[_Layer], Tensor, _Linear, Rotary]:
        """Layers, last norm, head, angles."""
        return self._layers, self._norm, self._head, self._rotary


def _rounded_up(num_rows: int) -> int:
    """A little more than needed, so that growing steps do not rewrite the program each time."""
    return max(64, 1 << (num_rows - 1).bit_length())


class _Program:
    """The operations for steps of up to `capacity` rows, and the buffers they name."""

    def __init__(
        self, decoder: CompiledDecoder, caches: Sequence[LayerCache], capacity: int
    ) -> None:
        self.capacity = capacity
        config = decoder.config
        self._launcher = decoder.launcher
        self._code = self._launcher.program
        mixed = config.num_heads * config.head_dim
        qkv = mixed + 2 * config.num_kv_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, mixed)
        self.embedded = torch.empty((capacity, config.hidden_size), dtype=torch.float16)
        self.hidden = self._floats(config.hidden_size)
        self._normed = self._floats(config.hidden_size)
        self._delta = self._floats(config.hidden_size)
        self._qkv = self._floats(qkv)
        self._gate_up = self._floats(2 * config.intermediate_size)
        self._products = self._floats(config.intermediate_size)
        # a row: int8 or int16 for matrices of 4 and 8 bits, float32 for those of 16
        self._rows = torch.empty((capacity, widest), dtype=torch.float32)
        self._scales = self._floats(widest // 16)
        group = config.num_heads // config.num_kv_heads
        self._num_kv_heads = config.num_kv_heads
        self._piece_bytes = self._code.piece_bytes(group, config.head_dim)
        self._pieces = torch.empty(0, dtype=torch.uint8)
        self._ops: list[list[int]] = []
        layers, norm, head, rotary = decoder.parts()
        for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            self._add_layer(config, layer, cache, rotary, is_first=index == 0)
        self._add_norm(norm, head.matrix, has_delta=True, is_last=True)
        self._add_matmul(head, None, is_last=True)
        self.best = np.empty(0, dtype=np.int64)
        self._ops.append([self._code.BEST, 0, config.vocab_size, 0])
        self._table = np.zeros((len(self._ops), self._code.OP_FIELDS), dtype=np.int64)
        for row, op in zip(self._table, self._ops, strict=True):
            row[: len(op)] = op
        self._counters = np.zeros(len(self._ops) + 64, dtype=np.int64)
        self._header = self._make_header(config)
        self._keep = (layers, norm, head, rotary, caches)

    def run(self, inputs: StepInputs, logits: Tensor) -> None:
        """`hidden` holds the embedded rows; the logits are written."""
        code, header = self._code, self._header
        tiles = _tiles(inputs, code.QUERY_TILE)
        self._counters.fill(0)
        if len(logits) > len(self.best):
            self.best = np.empty(self.capacity, dtype=np.int64)
        self._table[-2, 6] = self._table[-1, 1] = logits.data_ptr()
        self._table[-1, 3] = self.best.ctypes.data
        header[code.NUM_ROWS] = len(inputs.token_ids)
        header[code.NUM_LOGIT_ROWS] = len(inputs.logit_rows)
        # the last norm, the head and the best are skipped where no row wants logits
        header[code.NUM_OPS] = len(self._ops) - (0 if len(inputs.logit_rows) else 3)
        header[code.LOGIT_ROWS] = inputs.logit_rows.data_ptr()
        header[code.POSITIONS] = inputs.positions.data_ptr()
        header[code.BLOCKS] = inputs.block_ids.data_ptr()
        header[code.NUM_TILES] = len(tiles)
        header[code.TILES] = tiles.ctypes.data
        header[code.NUM_PIECES] = self._num_pieces(inputs, len(tiles))
        self._launcher.run(header)

    def _num_pieces(self, inputs: StepInputs, num_tiles: int) -> int:
        """Into how many pieces the threads cut a sequence's keys; 0: no thread would be idle."""
        code, threads = self._code, self._launcher.num_threads
        num_items = num_tiles * self._num_kv_heads
        longest = max(span.seq_len for span in inputs.spans)
        pieces = -(-longest // (code.BLOCK_SIZE * code.PIECE_BLOCKS))
        if threads == 1 or pieces == 1 or num_items >= ITEMS_PER_THREAD * threads:
            return 0
        size = num_items * pieces * self._piece_bytes
        if size > len(self._pieces):
            self._pieces = torch.empty(size, dtype=torch.uint8)
        self._header[code.PIECES] = self._pieces.data_ptr()
        return int(pieces)

    def _floats(self, width: int) -> Tensor:
        return torch.empty((self.capacity, width), dtype=torch.float32)

    def _add_layer(
        self,
        config: ModelConfig,
        layer: _Layer,
        cache: LayerCache,
        rotary: Rotary,
        is_first: bool,
    ) -> None:
        code = self._code
        keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._add_norm(layer.attention_norm, layer.qkv.matrix, has_delta=not is_first)
        self._add_matmul(layer.qkv, self._qkv)
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, _block_stride(cache))
        norms = [
            0 if norm is None else norm.data_ptr() for norm in (layer.query_norm, layer.key_norm)
        ]
        angles = (rotary.cos.data_ptr(), rotary.sin.data_ptr())
        self._ops.append([code.ROPE, self._qkv.data_ptr(), keys, values, *norms, *angles, *shape])
        attend = [
            self._qkv.data_ptr(),
            keys,
            values,
            self._rows.data_ptr(),
            self._scales.data_ptr(),
            layer.output.matrix.bits,
            config.sliding_window or 0,
            *shape,
            _float_bits(config.head_dim**-0.5),
            self._piece_bytes,
        ]
        self._ops.append([code.ATTEND, *attend])
        self._ops.append([code.MERGE, *attend])
        self._add_matmul(layer.output, self._delta)
        self._add_norm(layer.mlp_norm, layer.gate_up.matrix, has_delta=True)
        self._add_matmul(layer.gate_up, self._gate_up)
        self._ops.append(
            [
                code.GATE,
                self._gate_up.data_ptr(),
                self._products.shape[1],
                layer.down.matrix.bits,
                self._rows.data_ptr(),
                self._scales.data_ptr(),
                self._products.data_ptr(),
            ]
        )
        self._add_matmul(layer.down, self._delta)

    def _add_norm(
        self, weight: Tensor, reader: PackedMatrix, has_delta: bool, is_last: bool = False
    ) -> None:
        self._ops.append(
            [
                self._code.NORM,
                self.hidden.data_ptr(),
                self._delta.data_ptr() if has_delta else 0,
                weight.data_ptr(),
                self.hidden.shape[1],
                reader.bits,
                self._rows.data_ptr(),
                self._scales.data_ptr(),
                int(is_last),
                self._normed.data_ptr(),
            ]
        )

    def _add_matmul(self, linear: _Linear, out: Tensor | None, is_last: bool = False) -> None:
        matrix = linear.matrix
        self._ops.append(
            [
                self._code.MATMUL,
                self._rows.data_ptr(),
                self._scales.data_ptr(),
                matrix.data.data_ptr(),
                matrix.num_inputs,
                matrix.num_outputs,
                0 if out is None else out.data_ptr(),
                4 * matrix.num_outputs,
                matrix.bits,
                0 if linear.bias is None else linear.bias.data_ptr(),
                int(is_last),
            ]
        )

    def _make_header(self, config: ModelConfig) -> Any:
        code, threads = self._code, self._launcher.max_threads
        header = np.zeros(code.HEADER_FIELDS, dtype=np.int64)
        scratch = code.scratch_bytes(config.num_heads // config.num_kv_heads, config.head_dim)
        self._scratch = torch.empty(scratch * threads, dtype=torch.uint8)
        # the two cells that threads write to lie apart from the operations' counters
        arrivals = self._counters.ctypes.data + 8 * (len(self._ops) + 16)
        header[code.OPS] = self._table.ctypes.data
        header[code.COUNTERS] = self._counters.ctypes.data
        header[code.ARRIVALS] = arrivals
        header[code.THREADS_SEEN] = arrivals + 8 * 16
        header[code.EPS] = _float_bits(config.rms_norm_eps)
        header[code.SCRATCH] = self._scratch.data_ptr()
        header[code.SCRATCH_STRIDE] = scratch
        return header


class _Thin:
    """One operation over rows of logits: which tokens can win the draw."""

    def __init__(self, launcher: Launcher, vocab_size: int) -> None:
        self._launcher, self._vocab_size = launcher, vocab_size
        code = launcher.program
        self._table = np.zeros(code.OP_FIELDS, dtype=np.int64)
        self._table[:3] = (code.THIN, 0, vocab_size)
        self._cells = np.zeros(40, dtype=np.int64)  # counter, arrivals, threads: lines of their own
        header = self._header = np.zeros(code.HEADER_FIELDS, dtype=np.int64)
        header[code.NUM_OPS] = 1
        header[code.OPS] = self._table.ctypes.data
        header[code.COUNTERS] = self._cells.ctypes.data
        header[code.ARRIVALS] = self._cells.ctypes.data + 128
        header[code.THREADS_SEEN] = self._cells.ctypes.data + 256

    def run(self, logits: Tensor, requests: Sequence[tuple[int, int, float]]) -> list[Any]:
        code = self._launcher.program
        asked = np.zeros((len(requests), code.REQUEST_FIELDS), dtype=np.int64)
        for at, (row, base, temperature) in enumerate(requests):
            signed = base - (1 << 64) if base >> 63 else base
            asked[at, :3] = (row, signed, _float_bits(1 / temperature))
        left = np.empty((len(requests), code.MOST_LEFT + 1), dtype=np.int64)
        self._cells.fill(0)
        self._table[1] = logits.data_ptr()
        self._table[3:5] = (asked.ctypes.data, left.ctypes.data)
        self._header[code.NUM_ROWS] = len(requests)
        self._launcher.run(self._header)
        counts = left[:, 0].tolist()
        return [
            ids[1 : count + 1] if count <= code.MOST_LEFT else None
            for ids, count in zip(left, counts, strict=True)
        ]


def _block_stride(cache: LayerCache) -> int:
    return cache.keys.stride(0) * cache.keys.element_size()


def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _tiles(inputs: StepInputs, size: int) -> Any:
    """Query tiles, the longest look-back first, so that no thread ends with a long one alone."""
    tiles = []
    for span in inputs.spans:
        table = span.block_ids.data_ptr()
        first = span.seq_len - span.num_tokens
        for begin in range(0, span.num_tokens, size):
            count = min(size, span.num_tokens - begin)
            tiles.append((span.start + begin, count, first + begin, table))
    tiles.sort(key=lambda tile: tile[1] * (tile[1] + tile[2]), reverse=True)
    return np.array(tiles, dtype=np.int64)


class _Loader:
    """Takes tensors out of the checkpoint, packs them and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.size_bytes = 0
        self.matrices: dict[int, int] = {}  # bits: how many

    def norm(self, name: str) -> Tensor:
        weight = self._checkpoint.tensor(f"{name}.weight", torch.float32)
        self.size_bytes += weight.nbytes
        return weight

    def linear(
        self, names: tuple[str, ...], num_outputs: int, num_inputs: int, has_bias: bool
    ) -> _Linear:
        """Several matrices that read the same rows, as one."""
        matrix = self._pack([f"{name}.weight" for name in names])
        found = (matrix.num_outputs, matrix.num_inputs)
        if found != (num_outputs, num_inputs):
            raise BadModel(f"{names[0]} has shape {found}, {(num_outputs, num_inputs)} expected")
        bias = None
        if has_bias and self._checkpoint.has(f"{names[0]}.bias"):
            parts = [self._checkpoint.tensor(f"{name}.bias", torch.float32) for name in names]
            bias = torch.cat(parts)
            self.size_bytes += bias.nbytes
        self.size_bytes += matrix.size_bytes
        self.matrices[matrix.bits] = self.matrices.get(matrix.bits, 0) + 1
        return _Linear(matrix, bias)

    def _pack(self, names: list[str]) -> PackedMatrix:
        blocks = [self._checkpoint.blocks(name) for name in names]
        exact = [part for part in blocks if part is not None]
        if len(exact) == len(names) and len({part.bits for part in exact}) == 1:
            return _join(exact)
        weight = torch.cat([self._checkpoint.tensor(name, torch.float32) for name in names])
        packed, error = cpu_pack.pack_8bit_measured(weight)
        if error <= cpu_pack.MAX_ROUNDING_ERROR or len(weight) % cpu_pack.COLUMNS:
            return packed
        log.warning("%s stays in 16 bits: 8 would be off by %.2f %%", names[0], 100 * error)
        return cpu_pack.pack_16bit(weight)


def _join(parts: list[QuantBlocks]) -> PackedMatrix:
    quants = torch.cat([part.quants for part in parts])
    scale = torch.cat([part.scale for part in parts])
    if parts[0].offset is None:
        return cpu_pack.join_8bit(quants, scale)
    offsets = [part.offset for part in parts if part.offset is not None]
    return cpu_pack.join_4bit(quants, scale, torch.cat(offsets))


def _load_layer(load: _Loader, index: int) -> _Layer:
    config = load._checkpoint.config
    prefix = f"model.layers.{index}."
    mixed, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def named(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}" for name in names)

    has_norms = config.family.qk_norm
    return _Layer(
        attention_norm=load.norm(f"{prefix}input_layernorm"),
        mlp_norm=load.norm(f"{prefix}post_attention_layernorm"),
        query_norm=load.norm(f"{prefix}self_attn.q_norm") if has_norms else None,
        key_norm=load.norm(f"{prefix}self_attn.k_norm") if has_norms else None,
        qkv=load.linear(
            named("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            mixed + 2 * kv,
            hidden,
            config.qkv_bias,
        ),
        output=load.linear(named("self_attn.o_proj"), hidden, mixed, config.o_bias),
        gate_up=load.linear(
            named("mlp.gate_proj", "mlp.up_proj"), 2 * inner, hidden, config.mlp_bias
        ),
        down=load.linear(named("mlp.down_proj"), hidden, inner, config.mlp_bias),
    )
