"""Reads the weights of a GGUF file.

Types of four bits become four-bit linears with groups of 32, and Q5_0, Q6_K and Q8_0 eight-bit
ones. Others are dequantized, and quantized to eight bits; MXFP4 becomes bf16, which has its values.

    Q4_0   fp16 scale, 16 bytes: weight = scale * (code - 8)
    Q4_1   fp16 scale, fp16 minimum, 16 bytes: weight = scale * code + minimum
    Q4_K   eight blocks: fp16 scale, fp16 minimum, 12 bytes with 6 bits of each block's scale and of
           its minimum, 128 bytes: weight = scale * block scale * code - minimum * block minimum
    Q5_0   fp16 scale, 4 bytes of highest bits, 16 bytes: weight = scale * (code - 16)
    Q6_K   sixteen blocks of 16: 128 bytes with the low 4 bits of codes, 64 with the upper 2, 16
           block scales of a signed byte, fp16 scale: weight = scale * block scale * (code - 32)
    Q8_0   fp16 scale, 32 codes of a byte: weight = scale * code

In Q4_0, Q4_1 and Q5_0, byte i has code i in its low bits and code i + 16 in its high bits; in Q4_K,
32 bytes have two blocks, one in the low bits. In each half of Q6_K, the low bits of 64 bytes have
the first 64 codes; the pairs of bits of 32 bytes have 32 codes each.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from services.engine.weights.llama_order import as_llama, neighbours_apart, rows_of
from services.engine.weights.weights import Form, Weight, Weights
from services.model.checkpoint.stored_tensors import is_linear
from services.model.config.layout import EMBEDDING, expert_linears, weight_shapes
from services.model.config.model_config import ModelConfig
from services.model.gguf.config import check_tensors, form_of, gguf_family
from services.model.gguf.families import Place, tensor_places
from services.model.gguf.file import GgufFile, GgufTensor
from services.runtime.logging import get_logger

log = get_logger(__name__)

_GROUP = 32
_MOST_ZERO = 32768.0
"""The largest zero point: fp16 ends at 65504. Beyond it, a group is as good as constant."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = 4096
"""The rows of the embedding that are dequantized at once."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The tensors of GGUF files, by the names of Hugging Face checkpoints."""

    file: GgufFile
    config: ModelConfig
    places: Mapping[str, Place]
    data: Mapping[Path, Tensor]
    """The bytes of each mapped file."""
    has_pairs: bool
    """Whether the rows of queries and keys are in llama.cpp's order."""

    def tensor(self, name: str) -> GgufTensor:
        return self.file.tensors[self.places[name].name]

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes: uint8 [rows, bytes of a row]; of a vector [1, bytes]."""
        tensor, expert = self.tensor(name), self.places[name].expert
        begin, num_bytes = tensor.begin, tensor.num_bytes
        if expert is not None:
            num_bytes //= tensor.shape[0]
            begin += expert * num_bytes
        raw = self.data[tensor.path][begin : begin + num_bytes]
        return raw.view(len(raw) // _row_bytes(tensor), -1)

    def floats(self, name: str) -> Tensor:
        """The tensor in the floating-point type of the file, or dequantized."""
        values = _float(self.raw(name), self.tensor(name))
        num_dimensions = len(self.tensor(name).shape) - (self.places[name].expert is not None)
        return values if num_dimensions == 2 else values.flatten()

    def order(self, linear: str) -> Tensor | None:
        """The row of the file for each output of a linear; None if the order is the same. llama.cpp
        puts outputs i and i + head_dim / 2 of each head, which rotate together, next to each
        other."""
        config = self.config
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        num_heads = heads.get(linear.rpartition(".")[2])
        if num_heads is None or not self.has_pairs:
            return None
        return neighbours_apart(num_heads, config.head_dim, config.head_dim)


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """`Weights` of GGUF files."""

    stored: _Stored
    tensors: Mapping[str, Tensor]

    def form(self, linear: str) -> Form:
        place = self.stored.places[f"{linear}.weight"]
        return form_of(self.stored.file, place.name) or "float"

    def linear(self, linear: str) -> Weight:
        name, stored = f"{linear}.weight", self.stored
        weight = _decoded(stored.raw(name), stored.tensor(name))
        order = stored.order(linear)
        return weight if order is None else rows_of(weight, order)


def load_gguf(path: Path, config: ModelConfig, embedding_dtype: torch.dtype) -> Weights:
    """A quantized embedding is dequantized to `embedding_dtype`. Raises StartupError as
    `check_tensors` does."""
    file = GgufFile.read(path)
    check_tensors(file, config)
    _log_growth(file)
    family = gguf_family(file)
    data = {part: _mapped(part) for part in file.paths}
    stored = _Stored(file, config, tensor_places(config, family), data, family.pairs)
    experts = (expert_linears(config, layer) for layer in range(config.num_layers))
    routers = {f"{linears.router}.weight" for linears in experts if linears is not None}
    tensors = {EMBEDDING: _embedding(stored, embedding_dtype)}
    for name, shape in weight_shapes(config).items():
        if name == EMBEDDING or (is_linear(name, shape) and name not in routers):
            continue
        value, order = stored.floats(name), stored.order(name.removesuffix(".bias"))
        tensors[name] = value if order is None else value[order]
    return as_llama(GgufWeights(stored, tensors), config)


def _log_growth(file: GgufFile) -> None:
    """Say what MXFP4 costs in memory: it is the only type that grows much."""
    grown = [tensor for tensor in file.tensors.values() if tensor.type.name == "MXFP4"]
    if grown:
        in_bf16 = sum(2 * math.prod(tensor.shape) for tensor in grown)
        stored = sum(tensor.num_bytes for tensor in grown)
        log.info("mxfp4_becomes_bf16", stored_bytes=stored, bf16_bytes=in_bf16)


def _mapped(path: Path) -> Tensor:
    with path.open("rb") as opened:
        # torch needs a writable buffer, so the mapping is copy-on-write; nothing writes to it.
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _embedding(stored: _Stored, dtype: torch.dtype) -> Tensor:
    """The embedding as it is stored, or in `dtype` if it is quantized."""
    tensor = stored.tensor(EMBEDDING)
    if tensor.type.name in _FLOATS:
        return stored.floats(EMBEDDING)
    raw, table = stored.raw(EMBEDDING), torch.empty(tensor.shape, dtype=dtype)
    for begin in range(0, len(table), _ROWS):
        rows = slice(begin, begin + _ROWS)
        table[rows] = _float(raw[rows], tensor)
    return table


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.shape[-1] // tensor.type.values * tensor.type.num_bytes


def _float(raw: Tensor, tensor: GgufTensor) -> Tensor:
    weight = _decoded(raw, tensor)
    return weight if isinstance(weight, Tensor) else weight.dequantized()


def _decoded(raw: Tensor, tensor: GgufTensor) -> Weight:
    """The rows `raw` of a tensor as codes, if a kind of linears has them, in the floating-point
    type of the file, or dequantized: MXFP4 to bf16, others to fp32."""
    name, blocks = tensor.type.name, raw.view(len(raw), -1, tensor.type.num_bytes)
    match name:
        case "F32" | "F16" | "BF16":
            return raw.view(_FLOATS[name])
        case "Q4_0":
            scales, codes = _half(blocks, 0), _halves(blocks[:, :, 2:])
            return Int4Weight(codes.flatten(1), scales, torch.full_like(scales, 8.0), _GROUP)
        case "Q4_1":
            return affine(_halves(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2))
        case "Q4_K":
            return _q4_k(blocks)
        case "Q5_0":
            highest = _parts(blocks[:, :, 2:6, None], 1).flatten(2)
            codes = _halves(blocks[:, :, 6:]) | highest << 4
            return Int8Weight(codes.to(torch.int8).flatten(1) - 16, _half(blocks, 0))
        case "Q6_K":
            low = _halves(blocks[:, :, :128].reshape(len(raw), -1, 64))
            upper = _parts(blocks[:, :, 128:192].reshape(len(raw), -1, 32, 1), 2)
            codes = low | upper.transpose(2, 3).flatten(2) << 4
            scales = _half(blocks, 208)[:, :, None] * blocks[:, :, 192:208].view(torch.int8)
            return Int8Weight(codes.to(torch.int8).flatten(1) - 32, scales.flatten(1), 16)
        case "Q8_0":
            return Int8Weight(blocks[:, :, 2:].view(torch.int8).flatten(1), _half(blocks, 0))
    import gguf  # takes a third of a second, which only these files need

    values = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name]))
    return values.bfloat16() if name == "MXFP4" else values


def _parts(octets: Tensor, num_bits: int) -> Tensor:
    """The parts of each byte [..., 1] with this number of bits, from the lowest."""
    return octets >> torch.arange(0, 8, num_bits, dtype=torch.uint8) & (1 << num_bits) - 1


def _q4_k(blocks: Tensor) -> Int4Weight:
    """Return the weights of a tensor in Q4_K, whose superblocks are uint8 [rows, K / 256, 144].

    A superblock has 12 bytes of scales and minimums. The low 6 bits of bytes 0 to 3 are the scales
    of the first four groups, and the low 6 bits of bytes 4 to 7 their minimums. A scale of the last
    four groups has its lower 4 bits in the low half of bytes 8 to 11, and its upper 2 bits at the
    top of bytes 0 to 3; a minimum has them in the high half of bytes 8 to 11 and at the top of
    bytes 4 to 7.
    """
    first, second, last = (blocks[:, :, begin : begin + 4] for begin in (4, 8, 12))
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=2)
    minimums = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=2)
    pairs = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, _GROUP)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=3)
    scale = _half(blocks, 0)[:, :, None] * scales
    minimum = _half(blocks, 2)[:, :, None] * minimums
    return affine(codes, scale.flatten(1), -minimum.flatten(1))


def affine(codes: Tensor, scales: Tensor, minimums: Tensor) -> Int4Weight:
    """weight = scale * code + minimum, as scale * (code - zero point). If the scale is 0, or tiny
    beside the minimum, all weights of the group are the minimum. codes: [rows, ...], K in all."""
    zeros = -minimums / scales
    constant = ~(zeros.abs() <= _MOST_ZERO)
    codes = codes.reshape(len(codes), -1, _GROUP) * ~constant[:, :, None]
    return Int4Weight(
        codes.flatten(1),
        minimums.abs().where(constant, scales),
        (-minimums.sign()).where(constant, zeros),
        _GROUP,
    )


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The fp16 at byte `begin` of each block, in fp32."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).float().squeeze(2)


def _halves(octets: Tensor) -> Tensor:
    return torch.cat([octets & 15, octets >> 4], dim=2)
