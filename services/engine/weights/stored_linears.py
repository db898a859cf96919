"""Decodes quantized linears of safetensors checkpoints.

Four-bit formats put eight values into an int32, the first into its lowest bits. N outputs, K
inputs, G = ceil(K / group):

    gptq            qweight [K / 8, N], along K; qzeros [G, N / 8], along N; scales [G, N]
    awq             qweight [K, N / 8] and qzeros [G, N / 8], along N in the order of
                    `_AWQ_PLACES`; scales [G, N]
    pack-quantized  weight_packed [N, K / 8], along K; weight_scale [N, G];
                    weight_zero_point [N / 8, G], along N
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvops.fp8 import Float8Weight
from kvops.int4 import Int4Weight
from kvops.int8 import GROUP, Int8Weight
from services.engine.weights.weights import Weight
from services.model.checkpoint.stored_tensors import FP8_BLOCK
from services.model.config.quantization import StoredQuantization
from services.runtime.errors import StartupError

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in an int32 of each of eight neighbouring outputs."""

_MIDDLE = 8.0
"""The zero point of symmetric weights."""

Parts = Callable[[str], Tensor | None]
"""Gives a tensor of a linear by the last part of its name, such as `qweight`."""


def decoded(stored: StoredQuantization, name: str, part: Parts, n: int, k: int) -> Weight:
    """The weights [n, k] of the quantized linear `name`. Raises StartupError if inputs are not in
    the order of their groups."""
    match stored.format:
        case "gptq":
            return _gptq(stored, name, part, n, k)
        case "awq":
            return _awq(stored, part, n, k)
        case "pack-quantized":
            return _pack_quantized(stored, part, n, k)
        case "int-quantized":
            scales = _of(part, "weight_scale").float().view(-1, 1)  # one for each output
            return Int8Weight(_of(part, "weight"), scales.repeat(1, -(-k // GROUP)))
        case _:
            return _fp8(stored, part)


def _gptq(stored: StoredQuantization, name: str, part: Parts, n: int, k: int) -> Int4Weight:
    order = part("g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(k) // stored.group):
        raise StartupError(f"{name}.g_idx: groups of inputs that are not neighbours (desc_act)")
    codes = nibbles(_of(part, "qweight").T)[:, :k]
    zeros = nibbles(_of(part, "qzeros"))[:, :n].T + float(stored.zero_offset)
    return Int4Weight(codes, _of(part, "scales").T.float(), zeros, stored.group)


def _awq(stored: StoredQuantization, part: Parts, n: int, k: int) -> Int4Weight:
    codes, zeros = (_awq_order(nibbles(_of(part, name)))[:, :n].T for name in ("qweight", "qzeros"))
    return Int4Weight(codes, _of(part, "scales").T.float(), zeros.float(), stored.group)


def _awq_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, len(_AWQ_PLACES))[:, :, _AWQ_PLACES].flatten(1)


def _pack_quantized(stored: StoredQuantization, part: Parts, n: int, k: int) -> Int4Weight:
    codes, scales = nibbles(_of(part, "weight_packed"))[:, :k], _of(part, "weight_scale").float()
    zeros = torch.full_like(scales, _MIDDLE)
    if not stored.symmetric:
        zeros = nibbles(_of(part, "weight_zero_point").T)[:, :n].T.float()
    return Int4Weight(codes, scales, zeros, stored.group)


def _fp8(stored: StoredQuantization, part: Parts) -> Float8Weight:
    """There is a scale for each block, a scale for each output, or one scale."""
    codes = _of(part, "weight").view(torch.uint8)
    scale = part("weight_scale_inv")
    scale = (_of(part, "weight_scale") if scale is None else scale).float()
    if stored.block:
        scales = scale.repeat_interleave(FP8_BLOCK, 0)[: len(codes)]
    else:
        num_blocks = -(-codes.shape[1] // FP8_BLOCK)
        scales = scale.view(-1, 1).repeat(len(codes) // scale.numel(), num_blocks)
    return Float8Weight(codes, scales)


def _of(part: Parts, name: str) -> Tensor:
    tensor = part(name)
    assert tensor is not None  # `checked_weights` has seen it
    return tensor


def nibbles(words: Tensor) -> Tensor:
    """int32 [rows, columns] -> uint8 [rows, 8 * columns], from each word's lowest bits up."""
    octets = words.contiguous().view(torch.uint8)  # little-endian, as every CPU of ours
    return torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)
