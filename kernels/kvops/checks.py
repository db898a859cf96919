"""Checks of the shapes, dtypes and devices of an operation's tensors; they read no values."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def shown(tensor: Tensor) -> str:
    """The dtype, shape and device of a tensor, for error messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def fits(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the tensor has this shape; -1 in `shape` means any size."""
    return tensor.dim() == len(shape) and all(
        wanted in (-1, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )


def check_beside(name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the tensor has this shape, and the dtype and device of `like`."""
    if (
        not fits(tensor, shape)
        or tensor.dtype != like.dtype
        or tensor.device != like.device
        or tensor.dtype not in DTYPES
    ):
        raise ValueError(f"{name}: {shown(tensor)} is not {list(shape)} beside {shown(like)}")


def check_norm(weight: Tensor, x: Tensor) -> None:
    like = weight if weight.dtype == torch.float32 and weight.device == x.device else x
    check_beside("weight", weight, like, (x.shape[-1],))


def check_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_tokens, _, head_dim = q.shape
    check_beside("k", k, q, (num_tokens, -1, head_dim))
    for name, table in (("cos", cos), ("sin", sin)):
        has_shape = fits(table, (num_tokens, cos.shape[-1])) and 2 * cos.shape[-1] <= head_dim
        if table.dtype != torch.float32 or not has_shape:
            raise ValueError(f"{name}: {shown(table)} is not fp32 [T, R / 2] of q {shown(q)}")


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not fits(tensor, shape) or tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name}: {shown(tensor)} is not an integer {list(shape)}")
