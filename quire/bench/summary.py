"""The figures of a run, by the definitions of `vllm bench serve`; see `docs/bench.md`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.bench.record import Record, percentile, running

SLOS = ("ttft", "tpot", "e2e")
"""The figures that `--goodput` can limit."""

_LATE_MS = 10.0


def summarize(
    records: Sequence[Record], duration_s: float, slo_ms: Mapping[str, float]
) -> dict[str, Any]:
    """All figures. Latencies are those of whole answers only; the tokens are those of requests that
    did not fail."""
    whole = [record for record in records if record.is_whole]
    cut = [record for record in records if record.is_cut]
    num_prompt = sum(record.num_prompt_tokens for record in whole)
    num_output = sum(record.num_output_tokens for record in (*whole, *cut))
    tpots = [tpot for record in whole if (tpot := record.tpot_s) is not None]
    return {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_completed": len(whole),
        "num_cut": len(cut),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "error_messages": _messages(records),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "request_throughput": len(whole) / duration_s,
        "output_token_throughput": num_output / duration_s,
        "total_token_throughput": (num_prompt + num_output) / duration_s,
        "max_concurrency": max((number for _, number in running(records)), default=0),
        "ttft_ms": distribution(record.ttft_s for record in whole),
        "tpot_ms": distribution(tpots),
        "itl_ms": distribution(gap for record in whole for gap in record.gaps_s),
        "e2e_ms": distribution(record.e2e_s for record in whole),
        "lateness_ms": distribution(record.late_s for record in records),
        "slo_ms": dict(slo_ms),
        "goodput": sum(meets(record, slo_ms) for record in whole) / duration_s if slo_ms else None,
    }


def distribution(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return mean and percentiles in milliseconds, or None without values."""
    ordered = sorted(1000 * value for value in seconds)
    if not ordered:
        return None
    figures = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **figures, "max": ordered[-1]}


def meets(record: Record, slo_ms: Mapping[str, float]) -> bool:
    """Whether a whole answer keeps every limit. A single token keeps every limit of TPOT."""
    found = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(1000 * found[name] <= limit for name, limit in slo_ms.items())


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """Warnings for readers of the figures."""
    found = []
    late = summary["lateness_ms"]
    if late and late["p99"] > _LATE_MS:
        found.append(
            f"1 % of the requests were sent {late['p99']:.0f} ms late or more: the load generator "
            "was too slow for this rate, and the server got less load than asked for"
        )
    if summary["errors"]:
        num_failed = sum(summary["errors"].values())
        found.append(f"{num_failed} requests failed; the latencies leave them out")
    if summary["num_cut"] > summary["num_completed"]:
        found.append(
            f"only {summary['num_completed']} requests ended within --duration: the latencies "
            f"leave out {summary['num_cut']} that were cut off, which are the longer ones"
        )
    return found


def _messages(records: Sequence[Record]) -> dict[str, str]:
    """The first message of each kind of error."""
    return {record.error: record.message for record in reversed(records) if record.error}
