"""The decoder in native code for CPUs: one call per step, with weights that are packed into panels
and shared by all workers of the host.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvops.native import (
    PACKING,
    Adapter,
    Experts,
    Head,
    Kind,
    Layer,
    LowRank,
    NativeAdjustment,
    NativeCpu,
    NativeDraw,
    PackedLinear,
    Shape,
    aligned,
    packed_bytes,
)
from services.engine.batch import Answer, Draw, Fault, Query
from services.engine.models.model import Batch, embedding_scale
from services.engine.models.rope import rope_tables
from services.engine.sampling.logprobs import scores_of
from services.engine.sampling.sampler import SMALLEST_TEMPERATURE, least_scaled
from services.engine.sampling.sampling_head import join_answers
from services.engine.weights.adapter_weights import JoinedAdapter, joined_adapters
from services.engine.weights.checkpoint import weights_digest
from services.engine.weights.fused_weights import (
    COLUMNS,
    HEAD_SECTION,
    Section,
    all_sections,
    expert_sections,
    layer_sections,
)
from services.engine.weights.kinds import packable, section_kinds
from services.engine.weights.packed_file import Contents, Facts, Progress, packed_file
from services.engine.weights.weights import Weights
from services.model.checkpoint.adapter import AdapterFiles
from services.model.checkpoint.weights import weight_files
from services.model.config.layout import EMBEDDING, FINAL_NORM, layer_prefix, norm_places
from services.model.config.model_config import ModelConfig
from services.model.config.quantization import Quantization
from services.model.config.rope_config import RopeConfig
from services.runtime.errors import StartupError

_NO_TOKEN = -1
"""Marks a token that the native head has to draw and, in its answer, logits that are not finite."""


_SITES = ("qkv", "output", "gate_up", "down")
"""The linears of a layer in the order of an `Adapter`'s."""


class FusedModel:
    """A `Model` on CPUs. The residual stream is fp32; linears round it to the weights' dtype."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        cpu: NativeCpu,
        weights: Mapping[str, Tensor],
        packed: Mapping[str, PackedLinear],
        digest: str,
    ) -> None:
        """`packed` has the linears by section name. `weights` are the checkpoint's tensors, of
        which embedding and norms are not packed. `digest` is the digest of the weight files."""
        self.config = self.whole_config = config
        self.dtype, self.device = dtype, torch.device("cpu")
        self.weights_digest = digest
        tables = rope_tables(config)
        layers = [
            _layer(config, layer, tables, weights, packed) for layer in range(config.num_layers)
        ]
        self._isa, self._layers = cpu.isa, layers
        self._decoder = cpu.decoder(
            _shape(config, dtype),
            layers,
            _readable(weights[EMBEDDING]),
            weights[FINAL_NORM].float(),
        )
        self._head = cpu.head(packed[HEAD_SECTION], config.logit_scale, config.logit_cap or 0.0)

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        added: list[list[LowRank | None]] = [[None] * len(_SITES) for _ in self._layers]
        cpu = NativeCpu(isa=self._isa)  # steps use the threads of the model's own
        for one in joined_adapters(files, self.config):
            added[one.layer][_SITES.index(one.site)] = _low_rank(cpu, self.dtype, one)
        return Adapter(self._layers, added)

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        hidden = torch.empty(len(wanted), self.config.hidden_size)
        self._decoder.forward(
            [(run.adapter, run.begin, run.end) for run in batch.adapters],
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.cu_query_lens,
            batch.context_lens,
            wanted,
            kv,
            hidden,
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), self.config.vocab_size)
        if len(hidden):
            self._head.logits(hidden, out)
        return out

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        """Answer the queries in one native call. Logits are in memory only for states with logprobs
        or with draws that are not plain."""
        return native_answers(self._head, hidden, queries, self.config.vocab_size)


def load_fused(
    directory: Path,
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    quantize: Quantization | None,
    cpu: NativeCpu,
    cache: Path | None,
    progress: Progress,
) -> FusedModel:
    """Load a checkpoint for the native kernels, with the arguments and errors of `load_model`. Also
    raises StartupError if the kernels do not support a shape or the cache cannot be written."""
    sections = {section.name: section for section in all_sections(config)}
    kinds = section_kinds(sections.values(), weights, dtype, quantize)
    sizes = {
        name: packed_bytes(kinds[name], s.num_outputs, s.num_inputs) for name, s in sections.items()
    }

    def contents(name: str) -> Iterator[Tensor]:
        section, kind = sections[name], kinds[name]
        parts = packable(kind, [weights.linear(source) for source in section.sources])
        for piece in cpu.packed_pieces(kind, section.num_outputs, parts, section.turn):
            progress()
            yield piece

    if cache is None:
        memories: Mapping[str, Tensor] = {
            name: _gather(size, contents(name)) for name, size in sizes.items()
        }
        digest = weights_digest(directory, progress)
    else:
        memories, digest = _cached(directory, config, kinds, cache, sizes, contents, progress)
    packed = {
        name: _packed(s, kinds[name], memories[name], weights.tensors)
        for name, s in sections.items()
    }
    try:
        return FusedModel(config, dtype, cpu, weights.tensors, packed, digest)
    except ValueError as error:
        c = config
        shape = f"hidden_size is {c.hidden_size}, with {c.num_heads} heads of {c.head_dim}"
        raise StartupError(f"{directory}: {error}: {shape}") from error


def _low_rank(cpu: NativeCpu, dtype: torch.dtype, one: JoinedAdapter) -> LowRank:
    """Pack an adapter: A with a row for each rank, B in the linear's panels, and for each `COLUMNS`
    outputs the first rank of A x that their B multiplies."""
    kind: Kind = "float32" if dtype == torch.float32 else "bfloat16"
    n, turn = one.section.num_outputs, one.section.turn
    down, ups, firsts = one.down, one.ups, one.firsts
    if not turn and any(len(up) % COLUMNS for up in ups[:-1]):  # some have outputs of two sources
        down, up = one.whole()
        ups, firsts = [up], [0]
    rank, num_firsts = ups[0].shape[1], 2 * -(-n // (2 * COLUMNS))
    if turn:
        firsts = firsts * (num_firsts // len(firsts))
    else:
        firsts = [
            at for up, at in zip(ups, firsts, strict=True) for _ in range(0, len(up), COLUMNS)
        ]
        firsts += [0] * (num_firsts - len(firsts))
    ups = [up.to(dtype) for up in ups]
    memory = _gather(packed_bytes(kind, n, rank), cpu.packed_pieces(kind, n, ups, turn))
    packed = PackedLinear(kind, n, rank, memory, None)
    return down.to(dtype), packed, torch.tensor(firsts, dtype=torch.int32)


def _gather(num_bytes: int, pieces: Iterable[Tensor]) -> Tensor:
    memory = aligned(num_bytes)
    begin = 0
    for piece in pieces:
        memory[begin : begin + len(piece)] = piece
        begin += len(piece)
    return memory


def _cached(
    directory: Path,
    config: ModelConfig,
    kinds: Mapping[str, Kind],
    cache: Path,
    sizes: Mapping[str, int],
    contents: Contents,
    progress: Progress,
) -> tuple[Mapping[str, Tensor], str]:
    """The packed sections, from the cache if they are current, and the digest of their weights."""
    origin = _origin(directory, config, kinds)

    def is_current(facts: Facts) -> bool:
        return bool(facts.get("origin") == origin)

    def make() -> tuple[Facts, Mapping[str, int], Contents]:
        digest = weights_digest(directory, progress)
        return {"origin": origin, "weights_digest": digest}, sizes, contents

    # Each way to quantize has a file of its own, so that changing it back does not pack again.
    resolved = directory.resolve()
    used = {kind for name, kind in kinds.items() if not name.endswith(".router")}
    digest = xxhash.xxh3_64_hexdigest(str(resolved).encode())
    name = f"{resolved.name}-{'+'.join(sorted(used))}-{digest}"
    packed = packed_file(cache / name, is_current, make, progress)
    return packed.sections, packed.facts["weights_digest"]


def _origin(directory: Path, config: ModelConfig, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Identifies the weights and their packing by sizes and times of files, without reading the
    weights. A packed file with the same origin is current."""
    status = {path.name: path.stat() for path in weight_files(directory)}
    return {
        "packing": PACKING,
        "kinds": dict(kinds),
        "config": str(asdict(config)),
        "files": {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in status.items()},
    }


def _layer(
    config: ModelConfig,
    index: int,
    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]],
    weights: Mapping[str, Tensor],
    packed: Mapping[str, PackedLinear],
) -> Layer:
    prefix, rope = layer_prefix(index), config.ropes[index]
    parts: dict[str, Any] = {
        place: None if name is None else weights[f"{prefix}.{name}.weight"].float()
        for place, name in norm_places(config.family).items()
    }
    parts |= {name: packed[s.name] for name, s in layer_sections(config, index).items()}
    experts = expert_sections(config, index)
    if experts is not None and config.experts is not None:
        parts["experts"] = Experts(
            router=packed[experts.router.name],
            gate_up=[packed[section.name] for section in experts.gate_up],
            down=[packed[section.name] for section in experts.down],
            top_k=config.experts.top_k,
            normalizes=config.experts.normalizes,
            alpha=config.experts.alpha,
            limit=config.experts.limit,
        )
    if config.family.sinks:
        parts["sinks"] = weights[f"{prefix}.self_attn.sinks"].float()
    cos, sin = (None, None) if rope is None else tables[rope]
    return Layer(window=config.windows[index] or 0, cos=cos, sin=sin, **parts)


def _shape(config: ModelConfig, dtype: torch.dtype) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        attention_cap=config.attention_cap or 0.0,
        embedding_scale=embedding_scale(config, dtype),
        residual_scale=config.residual_scale,
        norms_all_heads=config.family.qk_norm == "all heads",
        uses_gelu=config.family.activation == "gelu_pytorch_tanh",
    )


def _packed(
    section: Section, kind: Kind, memory: Tensor, weights: Mapping[str, Tensor]
) -> PackedLinear:
    bias = section.bias(weights)
    bias = None if bias is None else bias.float()
    return PackedLinear(kind, section.num_outputs, section.num_inputs, memory, bias)


def native_answers(
    head: Head, hidden: Tensor, queries: Sequence[Query], vocab_size: int
) -> list[Answer | Fault]:
    scored = [(i, query.num_top) for i, query in enumerate(queries) if query.num_top is not None]
    width = 1 + min(max((num_top for _, num_top in scored), default=0), vocab_size)
    tokens = torch.tensor([q.token if isinstance(q.token, int) else _NO_TOKEN for q in queries])
    token_ids = torch.empty(len(scored), width, dtype=torch.int64)
    logprobs = torch.empty(len(scored), width)
    ranks = torch.empty(len(scored), dtype=torch.int64)
    head.answer(
        hidden,
        torch.tensor([query.state for query in queries]),
        [_native_draw(query) for query in queries],
        tokens,
        torch.tensor([i for i, _ in scored], dtype=torch.int64),
        token_ids,
        logprobs,
        ranks,
    )
    found = [Fault.NOT_FINITE if token == _NO_TOKEN else token for token in tokens.tolist()]
    return join_answers(queries, found, scores_of(token_ids, logprobs, ranks))


def _native_draw(query: Query) -> NativeDraw | None:
    """Convert a draw; None if the query is for the likeliest token or for a given one."""
    if isinstance(query.token, int) or query.token.is_plain:
        return None
    return native_draw(query.token, query.position)


def native_draw(draw: Draw, position: int) -> NativeDraw:
    s, adjustment = draw.sampling, draw.adjustment
    temperature = max(s.temperature, SMALLEST_TEMPERATURE) if s.temperature else 0.0
    native = None
    if adjustment is not None:  # the native class has the same fields
        native = NativeAdjustment(
            **{f.name: getattr(adjustment, f.name) for f in fields(adjustment) if f.name != "state"}
        )
    return (
        *(temperature, least_scaled(s.min_p), s.top_k, s.top_p),
        *(s.seed, draw.sequence_index, position),
        native,
    )


def _readable(weight: Tensor) -> Tensor:
    """Return the checkpoint's own tensor if the kernels can read it; float16 becomes float32."""
    return weight.float() if weight.dtype == torch.float16 else weight
