"""Which layer lives on which device. Data, not a special case: one device is a map of one name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..protocol import DevicePart


def layer_map(parts: Sequence[DevicePart], num_layers: int) -> tuple[torch.device, ...]:
    """One device per layer, in the order of the parts; no parts: all on the CPU.

    Raises ValueError, with both numbers, if the parts do not add up to the layers.
    """
    devices: list[torch.device] = []
    for part in parts or [DevicePart("cpu", -1)]:
        left = num_layers - len(devices)
        count = left if part.num_layers < 0 else part.num_layers
        devices += [torch.device(part.device)] * count
    if len(devices) != num_layers:
        raise ValueError(f"the parts hold {len(devices)} layers, the model has {num_layers}")
    return tuple(devices)
