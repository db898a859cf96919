"""Defines a check, its outcome, and the machine that it runs on."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

import kvops
from bench.gpu.paged import PagedBatch
from kvops import Backend

TOLERANCE = {
    torch.float32: (1e-5, 5e-6),
    torch.bfloat16: (1.6e-2, 8e-3),
    torch.float16: (4e-3, 2e-3),
}
"""dtype -> (relative, absolute): a rounding of the result, and one of each weight."""

_TIMED_RUNS = 20

T = TypeVar("T")
Figures = Mapping[str, float | str]


class Failed(Exception):
    """A result is wrong or too slow; the text has the numbers."""


class Skipped(Exception):
    """The check cannot run here, or what it checks does not exist yet; the text says why."""


@dataclass(frozen=True, slots=True)
class Passed:
    """`detail` is for people, `figures` for programs."""

    detail: str
    figures: Figures = field(default_factory=dict)


Check = tuple[str, Callable[[], Passed]]


class Machine:
    """The GPU, or for a dry run the CPU with Triton's interpreter, which computes no bf16 and is
    slow: everything is tiny, and no speed is judged."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = "cpu" if dry_run else "cuda"
        self.half = torch.float16 if dry_run else torch.bfloat16

    @cached_property
    def ops(self) -> Backend:
        """The kernels that are checked."""
        return kvops.backend("triton")

    @cached_property
    def reference(self) -> Backend:
        """The kernels on the CPU that say what is right."""
        return kvops.backend("reference")

    @property
    def is_hopper(self) -> bool:
        """Whether limits that are measured on an H100 apply."""
        return not self.dry_run and torch.cuda.get_device_capability() == (9, 0)

    def judge(self, is_good: bool, wanted: str, detail: str, figures: Figures) -> Passed:
        """Raises Failed, with what is wanted, unless the figures are good. A dry run is too slow
        to be judged."""
        if not (is_good or self.dry_run):
            raise Failed(f"{detail}; wanted {wanted}")
        return Passed(detail, figures)

    def needs_gpu(self, what: str) -> None:
        """Raises Skipped in a dry run."""
        if self.dry_run:
            raise Skipped(f"{what} run on a GPU only")

    def pick(self, real: T, tiny: T) -> T:
        return tiny if self.dry_run else real

    def seconds(self, call: Callable[[], object]) -> float:
        """The best of some runs. Before each, a gigabyte goes through the cache, which also takes
        longer than the host needs to launch the call."""
        if self.dry_run:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        call()
        best = float("inf")
        for _ in range(_TIMED_RUNS):
            begin, end = _event(), _event()
            cache.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        return best

    def host_seconds(self, call: Callable[[], object]) -> float:
        """How long the host needs to launch the call, the mean of some runs."""
        call()
        self.synchronize()
        began = time.perf_counter()
        num_runs = self.pick(_TIMED_RUNS, 1)
        for _ in range(num_runs):
            call()
        seconds = (time.perf_counter() - began) / num_runs
        self.synchronize()
        return seconds

    def copy_rate(self) -> float:
        """Bytes that a copy within the GPU's memory reads and writes per second."""
        num_bytes = self.pick(1 << 30, 1 << 16)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source))

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()

    def moved(self, batch: PagedBatch) -> PagedBatch:
        """The batch on the device. Its layer is a strided view of an arena there too."""
        layer = batch.kv_layer
        arena = torch.empty_strided(
            layer.shape, layer.stride(), dtype=layer.dtype, device=self.device
        )
        names = ("q", "block_tables", "cu_query_lens", "context_lens")
        moved = {name: getattr(batch, name).to(self.device) for name in names}
        return replace(batch, kv_layer=arena.copy_(layer), **moved)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def compare(actual: Tensor, expected: Tensor, slack: float = 1.0) -> float:
    """The largest error as a share of what is allowed, the tolerance times `slack`. Raises Failed
    above 1, and for NaN."""
    rtol, atol = TOLERANCE[expected.dtype]
    actual, expected = actual.cpu().float(), expected.cpu().float()
    if not actual.numel():
        return 0.0
    allowed = slack * (atol + rtol * expected.abs())
    share = float(((actual - expected).abs() / allowed).max())
    if not share <= 1:  # NaN too
        raise Failed(f"an error is {share:.2f} times what is allowed")
    return share


def same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises Failed with the number of values that differ."""
    if not torch.equal(actual, expected):
        number = int((actual != expected).sum())
        raise Failed(f"{what}: {number} of {actual.numel()} values have other bits")


def worst(shares: Iterable[float], what: str) -> Passed:
    """The outcome of comparisons, from their errors; `what` names a comparison."""
    found = list(shares)
    detail = f"{len(found)} {what}; largest error {max(found):.2f} of what is allowed"
    return Passed(detail, {"error": max(found)})


def micros(seconds: Mapping[str, float]) -> str:
    """Times by name, as text."""
    return ", ".join(f"{name} {value * 1e6:,.0f} us" for name, value in seconds.items())
