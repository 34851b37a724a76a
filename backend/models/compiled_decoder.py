"""The decoder as one compiled program: same inputs and outputs as `Decoder`, other arithmetic.

Weights stay quantised (4 or 8 bit in groups of 32), a row's activations are rounded to int8 or
int16 per 32 before each product, everything between is float32, keys and values are bfloat16. A
row's result depends on its own sequence alone, to the bit.

Loading packs the weights (kernels.cpu_pack); compiled_program writes the operations and is written
anew when a step is larger than all before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_pack
from ..kernels.cpu_attention import Span
from ..kernels.cpu_launch import Launcher, why_not
from ..kernels.cpu_step import QUERY_TILE
from .checkpoint import Checkpoint
from .compiled_program import ACTIVATIONS, Network, PackedLayer, PackedLinear, Program, Thin
from .config import BadModel, LayerConfig, ModelConfig
from .decoder import LayerCache, StepInputs
from .packing import Packer, packing

log = logging.getLogger("llmd.models")

KV_DTYPE = torch.bfloat16
LEAST_ROWS, LEAST_POSITIONS = 64, 2048  # of a program
PART_ROWS = 256  # of a step for two threads: what lies between two products stays in the caches


def why_not_compiled(config: ModelConfig) -> str:
    """The reason why this model can't run as a compiled program here; empty if it can."""
    reason = why_not() or ", ".join(_unknown_kinds(config))
    if reason:
        return reason
    sizes = {layer.head_dim for layer in config.layers}
    widths = (config.hidden_size, config.intermediate_size)
    if any(width % cpu_pack.BLOCK for width in widths) or any(size % 32 for size in sizes):
        return f"widths {widths} and head sizes {sorted(sizes)} are not all multiples of 32"
    if config.vocab_size % cpu_pack.STRIP:
        return f"the vocabulary of {config.vocab_size} is not a multiple of {cpu_pack.STRIP}"
    return ""


def _unknown_kinds(config: ModelConfig) -> list[str]:
    """What the program has no operation for."""
    layers = config.layers
    ropes = [layer.rope for layer in layers if layer.rope is not None]
    differences = {
        f"{', '.join(sorted({layer.kind for layer in layers}))} layers": any(
            layer.kind != "attention" for layer in layers
        ),
        "layers that share keys and values": any(
            layer.shares_kv_of is not None or layer.keys_are_values for layer in layers
        ),
        "experts": config.experts is not None,
        f"activation {config.activation}": config.activation not in ACTIVATIONS,
        "gated attention": config.attention_gate,
        "attention sinks": config.sinks,
        "growing queries": any(rope.query_scaling_beta > 0 for rope in ropes),
        "a rotation of an odd size": any(rope.dim % 16 for rope in ropes),
        "a norm without a weight": config.norm_kind == "layer" and config.norms == "post",
    }
    return [name for name, is_so in differences.items() if is_so]


class CompiledDecoder:
    """A loaded network whose steps are single calls into compiled code.

    Raises BadModel if a tensor is missing or of another shape than the configuration says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        launcher: Launcher,
        progress: Callable[[float], None] = lambda share: None,
        part_rows: int = 0,
    ) -> None:
        """`part_rows` of a step pass through the network together; 0: as many as suit the
        threads."""
        config = checkpoint.config
        self.config = config
        self.dtype = KV_DTYPE
        self._launcher = launcher
        with packing(checkpoint, launcher) as packer:
            load = _Loader(checkpoint, packer)
            self._network = _load_network(load, config, progress)
        self.weights_bytes = load.size_bytes
        self.linear_layout = ", ".join(
            f"{count} × {bits} bit" for bits, count in sorted(load.matrices.items())
        )
        self._part_rows = part_rows or PART_ROWS * max(2, launcher.max_threads) // 2
        self._program: Program | None = None
        self._logits = torch.empty((0, config.vocab_size), dtype=torch.float32)
        self._best = np.empty(0, dtype=np.int64)
        self._thin = Thin(launcher, config.vocab_size)

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [num_logits, vocab_size] in float32. The next step writes over them.

        A step of many rows goes through the network in parts, the earlier tokens of a sequence
        first: a twentieth faster than at once, and with no more buffers than a part needs.

        Raises IndexError for a token that the vocabulary does not have: the program would read
        beyond its table.
        """
        if int(inputs.token_ids.max()) >= self.config.vocab_size or int(inputs.token_ids.min()) < 0:
            raise IndexError(f"a token is not among the {self.config.vocab_size} there are")
        num_logits = len(inputs.logit_rows)
        if num_logits > len(self._logits):
            # kept from step to step: fresh memory of this size costs a page fault per 1,024 logits
            self._logits = torch.empty((num_logits, self.config.vocab_size), dtype=torch.float32)
            self._best = np.empty(num_logits, dtype=np.int64)
        longest = max(span.seq_len for span in inputs.spans)
        at = 0
        for part in _parts(inputs, self._part_rows):
            end = at + len(part.logit_rows)
            program = self._program_for(len(part.token_ids), longest, caches)
            program.run(part, self._logits[at:end], self._best[at:end])
            at = end
        return self._logits[:num_logits]

    def _program_for(
        self, num_rows: int, num_positions: int, caches: Sequence[LayerCache]
    ) -> Program:
        program = self._program
        if program is None or not program.holds(num_rows, num_positions):
            if program is not None:  # neither size shrinks
                num_rows = max(num_rows, program.num_rows)
                num_positions = max(num_positions, program.num_positions)
            program = self._program = Program(
                self._network,
                self._launcher,
                caches,
                _rounded_up(num_rows, LEAST_ROWS),
                _rounded_up(num_positions, LEAST_POSITIONS),
            )
        return program

    @property
    def best(self) -> Any:
        """int64 [num_logits] of the last step: the lowest id of the largest logit; -1 where the
        logits are unusable."""
        return self._best

    def rest(self) -> None:
        """Nothing runs: give the buffers back that grew with the largest step. The next step makes
        them again, in about a millisecond."""
        self._program = None
        self._logits = torch.empty((0, self.config.vocab_size), dtype=torch.float32)
        self._best = np.empty(0, dtype=np.int64)

    def thin(self, requests: Sequence[tuple[int, int, float]]) -> list[Any]:
        """For rows of the last step's logits (row, hash, temperature): the ids that can win.

        The hash is `sampler.noise_base`; an entry is None where too many are left.
        """
        return self._thin.run(self._logits, requests)


def _parts(inputs: StepInputs, rows: int) -> Iterator[StepInputs]:
    """The step in pieces of about so many rows, in order; whole if it has not half as many again.

    A row sees the tokens before it in the cache, whichever part they were in.
    """
    num_rows = len(inputs.token_ids)
    num_parts = max(1, round(num_rows / rows))
    if num_parts == 1:
        yield inputs
        return
    size = -(-num_rows // (num_parts * QUERY_TILE)) * QUERY_TILE
    for begin in range(0, num_rows, size):
        yield _part(inputs, begin, min(begin + size, num_rows))


def _part(inputs: StepInputs, begin: int, end: int) -> StepInputs:
    """The rows from `begin` to before `end`."""
    wanted = inputs.logit_rows
    spans = (_cut(span, begin, end) for span in inputs.spans)
    return replace(
        inputs,
        token_ids=inputs.token_ids[begin:end],
        positions=inputs.positions[begin:end],
        block_ids=inputs.block_ids[begin:end],
        offsets=inputs.offsets[begin:end],
        spans=tuple(span for span in spans if span.num_tokens > 0),
        logit_rows=wanted[(wanted >= begin) & (wanted < end)] - begin,
        others=tuple(_part(other, begin, end) for other in inputs.others),
        states=(),  # no layer that can be compiled has one
    )


def _cut(span: Span, begin: int, end: int) -> Span:
    """What the rows from `begin` to before `end` have of a span."""
    first, last = max(span.start, begin), min(span.start + span.num_tokens, end)
    seq_len = span.seq_len - (span.start + span.num_tokens - last)
    return replace(span, start=first - begin, num_tokens=last - first, seq_len=seq_len)


def _rounded_up(count: int, least: int) -> int:
    """A little more than needed, so that growing steps do not rewrite the program each time."""
    return max(least, 1 << (count - 1).bit_length())


class _Loader:
    """Takes tensors out of the checkpoint, packed, and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint, packer: Packer) -> None:
        self._checkpoint = checkpoint
        self._packer = packer
        self.size_bytes = 0
        self.matrices: dict[int, int] = {}  # bits: how many

    def norm(self, name: str) -> Tensor:
        weight = self._checkpoint.tensor(f"{name}.weight", torch.float32)
        self.size_bytes += weight.nbytes
        return weight

    def linear(
        self, names: tuple[str, ...], num_outputs: int, num_inputs: int, has_bias: bool
    ) -> PackedLinear:
        """Several matrices that read the same rows, as one."""
        matrix = self._packer.matrix([f"{name}.weight" for name in names])
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
        return PackedLinear(matrix, bias)


def _load_network(load: _Loader, config: ModelConfig, progress: Callable[[float], None]) -> Network:
    table = load.linear(("model.embed_tokens",), config.vocab_size, config.hidden_size, False)
    layers = []
    for index, layer in enumerate(config.layers):
        layers.append(_load_layer(load, layer, index))
        progress((index + 1) / (config.num_layers + 1))
    head = table
    if not config.tied_embeddings:
        head = load.linear(("lm_head",), config.vocab_size, config.hidden_size, False)
    return Network(config, table.matrix, tuple(layers), load.norm("model.norm"), head)


def _load_layer(load: _Loader, layer: LayerConfig, index: int) -> PackedLayer:
    config = load._checkpoint.config
    prefix = f"model.layers.{index}."
    mixed, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def named(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}" for name in names)

    def norm(name: str, *placements: str) -> Tensor | None:
        return load.norm(prefix + name) if config.norms in placements else None

    has_norms = config.family.qk_norm or config.qk_norm_full
    return PackedLayer(
        config=layer,
        attention_norm=norm("input_layernorm", "pre", "sandwich", "parallel"),
        attention_out_norm=norm("attention_out_norm", "post", "sandwich"),
        mlp_norm=norm("post_attention_layernorm", "pre", "sandwich"),
        mlp_out_norm=norm("mlp_out_norm", "post", "sandwich"),
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
