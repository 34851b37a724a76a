"""A mixture of experts on the CPU: rows sorted by expert, one call for each expert that has any.

A row's answer is the sum of its experts' answers, added in the order of its own choices. What other
rows chose moves nothing, so a batch leaves every answer as it is.

Sources: Shazeer et al. 2017; the routers, Jiang et al., "Mixtral of Experts" (2024), and the model
cards of Qwen3 and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Expert = Callable[[Tensor], Tensor]


def route(
    logits: Tensor,
    num_active: int,
    kind: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    choice_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights and ids of the chosen experts, each [num_tokens, num_active].

    logits       [num_tokens, num_experts]
    kind         "softmax" or "sigmoid" over all; "topk_softmax" over the chosen alone
    choice_bias  [num_experts], added for the choice and not for the weights
    """
    logits = logits.float()
    if kind == "topk_softmax":
        chosen, ids = logits.topk(num_active, dim=-1)
        return chosen.softmax(-1) * scale, ids
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    ranked = scores if choice_bias is None else scores + choice_bias.float()
    ids = ranked.topk(num_active, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if kind == "sigmoid" else total)
    return weights * scale, ids


def mix(x: Tensor, weights: Tensor, ids: Tensor, experts: Sequence[Expert]) -> Tensor:
    """The weighted sum of the chosen experts' answers. x [num_tokens, hidden]."""
    num_tokens, num_active = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # pairs of (token, choice), by expert
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    tokens = order // num_active
    answers = torch.empty((num_tokens * num_active, x.shape[1]), dtype=x.dtype)
    at = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            pairs = order[at : at + count]
            answers[pairs] = expert(x[tokens[at : at + count]])
            at += count
    weighed = answers.view(num_tokens, num_active, -1).float() * weights.unsqueeze(-1)
    return weighed.sum(1).to(x.dtype)
