"""Philox4x64-10 (Salmon et al., 2011): random numbers that can be repeated anywhere (law 7)."""

import numpy as np
import torch
from torch import Tensor

_CLOSEST_BELOW_ONE = 1.0 - 2.0**-24


def uniforms(seed: int, sequence_index: int, position: int, count: int) -> Tensor:
    """`count` fp32 numbers in (0, 1), a function of the arguments alone: the same on any machine.

    `seed` has 64 bits. The key is (seed, 0); the counter, least significant word first, is
    (n, 0, sequence_index, position) for outputs 4n .. 4n + 3. The low half of output i gives number
    2i, its high half number 2i + 1, as (half + 1/2) / 2^32.
    """
    key = np.array([seed, 0], dtype=np.uint64)
    # numpy increments the counter before its first output, so it starts at one less, modulo 2^256.
    before = (position << 192 | sequence_index << 128) - 1
    generator = np.random.Philox(key=key, counter=before % 2**256)
    halves = generator.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    numbers = torch.from_numpy(halves.astype(np.float32))
    return numbers.add_(0.5).mul_(2.0**-32).clamp_(max=_CLOSEST_BELOW_ONE)
