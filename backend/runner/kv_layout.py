"""Which layers share a block, and where in it the keys and values of each lie.

A block holds `block_size` tokens of one group of layers. Layers that see everything are in other
groups than those that see a window, so that the blocks of the latter can be given back when the
window has passed (engine.batch.BlockGroups). All groups draw from one pool, hence their blocks are
equally long: as long as the largest group needs. The number of layers in a group is chosen so that
little is lost by that, and then as large as it can be.

    gemma-3 4b, 34 layers: 5 full, 29 windowed     blocks of 5 layers: 1 full group, 6 windowed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine.batch import BlockGroups
from ..models.config import LayerConfig, ModelConfig

MAX_WASTE = 0.1  # of the memory, for equally long blocks


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's keys begin in the blocks of its group, in elements per token; then values."""

    group: int
    offset: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Of one model. `places` has one entry for each layer; layers that read another's share it."""

    groups: BlockGroups
    places: tuple[Place, ...]
    width: int  # elements of one token in a block

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_size * self.width * dtype.itemsize

    def span_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of all groups, nothing given back yet."""
        return self.groups.num_groups * self.width * dtype.itemsize


def layout_of(config: ModelConfig, context_length: int) -> KVLayout:
    """Windows as long as the longest text there can be are none."""
    own = [i for i, layer in enumerate(config.layers) if layer.shares_kv_of is None]
    windowed = [i for i in own if _is_windowed(config.layers[i], context_length)]
    full = [i for i in own if i not in windowed]
    windows = [config.layers[i].window or 0 for i in windowed]
    dealt_full, dealt_windowed = _deal(config, full, windowed)
    dealt = [*dealt_full, *dealt_windowed]
    groups = BlockGroups(
        len(dealt_full), len(dealt_windowed), max(windows, default=0), not config.has_state
    )
    places: dict[int, Place] = {}
    for group, members in enumerate(dealt):
        offset = 0
        for index in members:
            places[index] = Place(group, offset)
            offset += _width(config.layers[index])
    for index, layer in enumerate(config.layers):
        if layer.shares_kv_of is not None:
            places[index] = places[layer.shares_kv_of]
    width = max((_sum(config, members) for members in dealt), default=0)
    return KVLayout(groups, tuple(places[i] for i in range(len(config.layers))), width)


def _is_windowed(layer: LayerConfig, context_length: int) -> bool:
    return layer.window is not None and layer.window < context_length


def _deal(
    config: ModelConfig, full: Sequence[int], windowed: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of full layers, and of windowed ones: few, and little lost."""
    needed = _sum(config, [*full, *windowed])
    best: tuple[list[list[int]], list[list[int]]] = ([], [])
    least = 0.0
    for size in range(max(len(full), len(windowed)), 0, -1):
        parts = _parts(full, size), _parts(windowed, size)
        members = [*parts[0], *parts[1]]
        width = max(_sum(config, group) for group in members)
        waste = 1 - needed / (len(members) * width)
        if full:  # they are what a long text holds
            waste = max(waste, 1 - _sum(config, full) / (len(parts[0]) * width))
        if not best[0] + best[1] or waste < least:
            best, least = parts, waste
        if waste <= MAX_WASTE:
            break
    return best


def _parts(layers: Sequence[int], size: int) -> list[list[int]]:
    return [list(layers[start : start + size]) for start in range(0, len(layers), size)]


def _sum(config: ModelConfig, layers: Sequence[int]) -> int:
    return sum(_width(config.layers[index]) for index in layers)


def _width(layer: LayerConfig) -> int:
    """Elements of a token's key and value."""
    return 2 * layer.num_kv_heads * layer.head_dim
