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
    NativeDraws,
    PackedLinear,
    Shape,
    aligned,
    packed_bytes,
)
from services.engine.models.model import Batch, embedding_scale
from services.engine.models.rope import rope_tables
from services.engine.sampling.adjustment import Adjustment
from services.engine.sampling.logprobs import ScoreTensors
from services.engine.sampling.sampling_batch import LOGITS_AT_ONCE, NOT_FINITE, SamplingBatch
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
from services.model.structured.mask import Mask
from services.runtime.errors import StartupError

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
        self._cpu, self._layers = cpu, layers
        self._decoder = cpu.decoder(
            _shape(config, dtype),
            layers,
            _readable(weights[EMBEDDING]),
            weights[FINAL_NORM].float(),
        )
        self._head = cpu.head(packed[HEAD_SECTION], config.logit_scale, config.logit_cap or 0.0)

    def load_adapter(self, files: AdapterFiles) -> Adapter:
        added: list[list[LowRank | None]] = [[None] * len(_SITES) for _ in self._layers]
        cpu = NativeCpu(isa=self._cpu.isa)  # steps use the threads of the model's own
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

    def draw(
        self, states: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None]
    ) -> Sequence[Tensor]:
        """Draw in one native call. Logits are in memory only for states with logprobs, or with
        draws of another than the likeliest token."""
        return native_draw(self._head, states, batch, masks, self.config.vocab_size)

    def score(self, states: Tensor, token_ids: Tensor, num_top: int) -> ScoreTensors:
        ids, logprobs, ranks = _new_scores(len(states), num_top, self.config.vocab_size)
        ids[:, 0] = token_ids
        for begin in range(0, len(states), LOGITS_AT_ONCE):
            part = slice(begin, begin + LOGITS_AT_ONCE)
            score = self.logits(states[part]), ids[part], logprobs[part], ranks[part]
            self._cpu.score(*score)
        return ids, logprobs, ranks


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


def native_draw(
    head: Head,
    states: Tensor,
    batch: SamplingBatch,
    masks: Sequence[Mask | None],
    vocab_size: int,
) -> Sequence[Tensor]:
    tokens = torch.full((len(batch.draws),), NOT_FINITE)
    scores = _new_scores(len(batch.scored), batch.num_top, vocab_size)
    head.draw(
        states,
        torch.tensor(batch.states),
        native_draws(batch, masks),
        tokens,
        *(torch.tensor(batch.scored, dtype=torch.int64), *scores),
    )
    return (tokens, *scores) if batch.scored else (tokens,)


def _new_scores(number: int, num_top: int, vocab_size: int) -> ScoreTensors:
    width = 1 + min(num_top, vocab_size)
    ids, ranks = torch.empty(number, width, dtype=torch.int64), torch.empty(number).long()
    return ids, torch.empty(number, width), ranks


def native_draws(batch: SamplingBatch, masks: Sequence[Mask | None]) -> NativeDraws:
    columns = {name: array for name, array in batch.columns.items() if name != "state"}
    adjustments = [
        None if draw.adjustment is None else _native_adjustment(draw.adjustment)
        for draw in batch.draws
    ]
    return NativeDraws(**columns, adjustments=adjustments, masks=list(masks))


def _native_adjustment(adjustment: Adjustment) -> NativeAdjustment:
    """The native class has the same fields."""
    names = (one.name for one in fields(adjustment) if one.name != "state")
    return NativeAdjustment(**{name: getattr(adjustment, name) for name in names})


def _readable(weight: Tensor) -> Tensor:
    """Return the checkpoint's own tensor if the kernels can read it; float16 becomes float32."""
    return weight.float() if weight.dtype == torch.float16 else weight
