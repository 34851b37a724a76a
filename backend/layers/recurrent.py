"""The arithmetic of layers that remember: a short convolution, and the gated delta rule.

Both go through one sequence from the first of its new tokens to the last, so that a chunk's border
changes nothing but where they stop.

Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024); Liquid AI's LFM2 (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel's sum over itself and the last inputs before it.

    x       [num_tokens, channels]
    weight  [channels, width]
    past    [width - 1, channels]: the inputs before x, zeros at the beginning of a sequence

    Returns the sums, and the past of the next call.
    """
    width = weight.shape[1]
    inputs = torch.cat((past, x))
    total = inputs[: len(x)] * weight[:, 0]
    for back in range(1, width):
        total = total + inputs[back : back + len(x)] * weight[:, back]
    return total, inputs[len(x) :]


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A memory that forgets, and corrects what it answers to a key.

    query, key   [num_tokens, heads, key_dim], normalised here to length 1
    value        [num_tokens, heads, value_dim]
    decay, beta  [num_tokens, heads]: log of what stays, and how much of the error is corrected
    state        [heads, key_dim, value_dim] in float32

    Returns the answers [num_tokens, heads, value_dim] in float32, and the state after them.
    """
    query = _unit(query.float()) * query.shape[-1] ** -0.5
    key, value = _unit(key.float()), value.float()
    kept = decay.float().exp()
    answers = torch.empty(value.shape, dtype=torch.float32)
    for at in range(len(value)):
        k = key[at].unsqueeze(-1)  # [heads, key_dim, 1]
        state = state * kept[at].view(-1, 1, 1)
        error = (value[at] - (state * k).sum(1)) * beta[at].float().unsqueeze(-1)
        state = state + k * error.unsqueeze(1)
        answers[at] = (state * query[at].unsqueeze(-1)).sum(1)
    return answers, state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def softplus_decay(a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """The log of what stays: rate · softplus(a + bias), where rate is negative."""
    return rate * functional.softplus(a.float() + bias)
