"""Makes the parts of a worker that it keeps when its role changes: pool, runner, graphs, CPUs."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from services.engine.forward import ForwardPass
from services.engine.runner import Runner
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.metrics import WorkerMetrics
from services.runtime.ticks import until_tick
from services.runtime.tracing.opening import open_tracer
from services.worker.adapters import WorkerAdapters
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.cpu.sharing import SharedCpus
from services.worker.drafting import speculation
from services.worker.file_cache.block_files import BlockFiles
from services.worker.file_cache.file_cache import FileCache
from services.worker.file_cache.pool_blocks import pool_blocks
from services.worker.grammars import Grammars
from services.worker.liveness.fence_guard import FenceGuard
from services.worker.loading import LoadedModel, new_runner
from services.worker.membership import Membership
from services.worker.pool_engine import WorkerParts
from services.worker.swap.pool import Copy, SwapPool

Works = Sequence[Coroutine[Any, Any, None]]
"""Coroutines whose errors end the worker."""

_DIVIDE_INTERVAL_S = 1.0

_NUM_WARM_UP_TOKENS = 32
"""Small: the longest prefill would take a second, to spare one prompt its page faults."""


async def make_parts(
    settings: WorkerSettings,
    loaded: LoadedModel,
    pools: Sequence[Membership],
    place: Place | None,
    health: Health,
    stack: AsyncExitStack,
) -> tuple[WorkerParts, Works]:
    """Make the parts of a worker on `pools`: its own, and its swap pool if it has one. `stack`
    closes the parts. Returns the parts with the works that run as long as the worker is on its
    pool."""
    limits, own = loaded.limits, pools[0]
    tracer = stack.enter_context(open_tracer(settings, settings.otlp_endpoint))
    registry = CollectorRegistry()
    stack.enter_context(metrics_endpoint(settings, registry, health))
    metrics, swap_pool = WorkerMetrics(registry), None
    guard = FenceGuard([one.lock for one in pools])
    for colder in pools[1:]:
        copies = _copies(loaded, own, colder)
        compares_costs = settings.preemption == "auto"
        swap_pool = SwapPool(own.store, own, colder, *copies, metrics, compares_costs, guard.check)
        stack.callback(swap_pool.close)
    files: FileCache | None = None
    if (root := settings.cache_directory) is not None:
        budget = settings.cache_budget, settings.num_expected_workers
        in_files = BlockFiles(root, loaded.layout.fingerprint, own.worker_id, *budget)
        blocks = partial(pool_blocks, own.pool.kv)
        files = FileCache(in_files, own.stamps, blocks, metrics, guard.check)
        stack.callback(files.close)
    grammars = Grammars(settings.model, limits.vocab_size, limits.eos_token_ids)
    grammars.warm_up()
    runner = await asyncio.to_thread(_warm_runner, loaded, own, settings)
    forward = _share_cpus(settings, runner, loaded, place, stack)
    launch_on = forward.launch_on if isinstance(forward, SharedCpus) else attrgetter("launch")
    load_adapter = loaded.ranks.adapters.load if loaded.ranks else loaded.model.load_adapter
    loras = loaded.model.whole_config, load_adapter, settings.max_loras, settings.max_lora_rank
    parts = WorkerParts(
        own.store,
        own,
        forward,
        limits,
        metrics,
        swap_pool,
        files,
        tracer=tracer,
        adapters=WorkerAdapters(*loras) if settings.max_loras else None,
        grammars=grammars,
        speculation=await asyncio.to_thread(speculation, settings, loaded.draft, runner, launch_on),
        check_fence=guard.check,
        lacks_draft=settings.drafts_with_model and loaded.draft is None,
    )
    works = [guard.watch(), own.watch_memory(), *(one.complete_memory() for one in pools)]
    if loaded.weights is not None and loaded.weights.kept is not None:
        works.append(loaded.weights.kept.keep())
    if isinstance(forward, SharedCpus):
        works.append(_refresh(forward))
    return parts, works


def _warm_runner(loaded: LoadedModel, own: Membership, settings: WorkerSettings) -> Runner:
    """Make the runner, compile and touch all that steps need, and on a GPU record the graphs of
    both roles."""
    model, kv, limits = loaded.model, own.pool.kv, loaded.limits
    runner = new_runner(model, kv, loaded.layout.block_size, loaded.ops, loaded.ranks)
    runner.warm_up(_NUM_WARM_UP_TOKENS, limits.max_num_seqs)
    if model.device.type == "cuda" and not settings.enforce_eager:
        runner.capture_graphs(
            settings.num_decode_rows,
            limits.max_num_batched_tokens,
            max_lora_rank=settings.graph_lora_rank,
        )
    return runner


def _share_cpus(
    settings: WorkerSettings,
    runner: Runner,
    loaded: LoadedModel,
    place: Place | None,
    stack: AsyncExitStack,
) -> ForwardPass:
    """The forward pass on the worker's part of the host's CPUs, if the worker shares them."""
    native = loaded.ops.native
    if native is None or place is None:
        return runner
    stack.callback(place.cpu_board.set_backlog, 0)  # the engine may end in the middle of a step
    gap_ms = settings.max_gap_ms
    max_gap_s = None if gap_ms is None else gap_ms / 1000
    return SharedCpus(runner, native, place.cpu_board, place.entry, place.host, max_gap_s)


def _copies(loaded: LoadedModel, own: Membership, colder: Membership) -> tuple[Copy, Copy]:
    """The copies to the swap pool and back, of all ranks."""
    out: Copy = partial(colder.pool.copy_from, own.pool, loaded.ops)
    back: Copy = partial(own.pool.copy_from, colder.pool, loaded.ops)
    if loaded.ranks is not None:
        return loaded.ranks.swapping(out, out=True), loaded.ranks.swapping(back, out=False)
    return out, back


async def _refresh(forward: SharedCpus) -> NoReturn:
    while True:
        forward.refresh()
        await asyncio.sleep(until_tick(_DIVIDE_INTERVAL_S))
