"""The weights of a layer's experts, and the router's choice among them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.grouped import GroupedWeight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E experts, each an MLP with a gate. The `top_k` experts with the largest logits compute a
    row. Their weights are the softmax of all logits, divided by the sum of the chosen ones if
    `normalizes`."""

    router: Tensor  # fp32 [E, hidden]
    gate_up: Tensor | GroupedWeight
    """[E, 2 * intermediate, hidden], the gate's outputs first; quantized ones are [E * 2 *
    intermediate, hidden]."""
    down: Tensor | GroupedWeight  # [E, hidden, intermediate], or [E * hidden, intermediate]
    top_k: int
    normalizes: bool
    router_bias: Tensor | None = None  # [E]
    gate_up_bias: Tensor | None = None  # [E, 2 * intermediate]
    down_bias: Tensor | None = None  # [E, hidden]
    alpha: float = 0.0
    limit: float = 0.0
    """The bound of `swiglu`, as `alpha` is its factor; 0 makes the gate SiLU."""

    @property
    def width(self) -> int:
        """The inputs of `down`."""
        down = self.down
        return down.num_inputs if isinstance(down, GroupedWeight) else down.shape[2]

    def of(self, expert: int) -> tuple[Tensor | GroupedWeight, ...]:
        """`gate_up` and `down` of an expert."""
        parts: list[Tensor | GroupedWeight] = []
        for weight in (self.gate_up, self.down):
            if isinstance(weight, GroupedWeight):
                each = len(weight.codes) // len(self.router)
                parts.append(weight.rows(expert * each, (expert + 1) * each))
            else:
                parts.append(weight[expert])
        return tuple(parts)

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
