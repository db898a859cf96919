"""The counter-based random numbers of law 7 (Salmon et al., 2011: Philox4x64-10)."""

import numpy as np
import torch
from torch import Tensor

_CLOSEST_BELOW_ONE = 1.0 - 2.0**-24


def uniforms(seed: int, sequence_index: int, position: int, count: int) -> Tensor:
    """`count` fp32 numbers in (0, 1), a function of the arguments alone: the same on any machine.

    Key: (seed, 0); counter, least significant first: (n, 0, sequence_index, position) for outputs
    4n .. 4n + 3. Number 2i is made of the low half of output i, number 2i + 1 of its high half, as
    (half + 1/2) / 2^32. seed: 64 bits.
    """
    key = np.array([seed, 0], dtype=np.uint64)
    # numpy counts up before its first output; one below 0 in the lower 128 bits borrows from above.
    before = (position << 192 | sequence_index << 128) - 1
    generator = np.random.Philox(key=key, counter=before % 2**256)
    halves = generator.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    numbers = torch.from_numpy(halves.astype(np.float32))
    return numbers.add_(0.5).mul_(2.0**-32).clamp_(max=_CLOSEST_BELOW_ONE)
