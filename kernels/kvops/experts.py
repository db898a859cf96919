"""The weights of a layer's experts, and the router's choice among them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E experts, each an MLP with a gate. router: fp32 [E, hidden]. gate_up: [E, 2 * intermediate,
    hidden], the gate's outputs first. down: [E, hidden, intermediate].

    A row is computed by the `top_k` experts with the largest logits. Their weights are the softmax
    of all logits, divided by the sum of the chosen ones if `normalizes`. Biases are [E], [E, 2 *
    intermediate] and [E, hidden]. `alpha`, `limit`: see `swiglu`; limit 0: the gate is SiLU.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    normalizes: bool
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts [T, top_k] of rows of fp32 logits [T, E], and their weights."""
        shares, chosen = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
        if self.normalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate / (1 + e^(-alpha gate)) * (up + 1), of a gate of at most `limit`, and `up` between
        -limit and limit; in fp32."""
        g = gate.float().clamp(max=self.limit)
        u = up.float().clamp(-self.limit, self.limit)
        return (g * torch.sigmoid(g * self.alpha) * (u + 1)).to(gate.dtype)
