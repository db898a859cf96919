"""The report of a run: a table for the terminal, and a self-contained HTML page."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quire.bench.charts import Line, chart, cumulative, steps, thinned
from quire.bench.record import Record, running
from quire.bench.summary import warnings

LATENCIES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2e_ms": "End-to-end latency",
    "lateness_ms": "Schedule lateness",
}
FIGURES = ("mean", "p50", "p90", "p99", "max")

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f6f7f9; --text: #1b1f24; --dim: #66707c;
  --line: #dfe3e8; --c1: #2563eb; --c2: #d97706; --c3: #059669; --c4: #9333ea; --bad: #dc2626; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #171b21; --text: #e6e9ed;
  --dim: #96a0ac; --line: #2a3038; --c1: #60a5fa; --c2: #fbbf24; --c3: #34d399; --c4: #c084fc;
  --bad: #f87171; } }
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p, small { color: var(--dim); }
.tiles, .charts { display: grid; gap: .8rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; margin: 0; }
.tile b { display: block; font-size: 1.2rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text :last-child { text-align: left; }
th { color: var(--dim); font-weight: 500; }
figcaption { font-weight: 600; } figcaption small { font-weight: 400; margin-right: .6rem; }
.key { font-weight: 400; font-size: .85rem; margin-right: .7rem; }
.key::before { content: "\\25CF"; margin-right: .25rem; }
.warning { border-left: 4px solid var(--bad); padding: .4rem .8rem; color: var(--text); }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2; }
.dots circle { opacity: .65; }
""" + "".join(
    f".key.c{n}::before {{ color: var(--c{n}); }} polyline.c{n} {{ stroke: var(--c{n}); }} "
    f".dots.c{n} {{ fill: var(--c{n}); }}\n"
    for n in (1, 2, 3, 4)
)


def latency_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and figures of each latency that was measured, in ms."""
    return [
        (f"{name} (ms)", [f"{summary[key][figure]:,.2f}" for figure in FIGURES])
        for key, name in LATENCIES.items()
        if summary[key] and (key != "lateness_ms" or summary[key]["max"] > 0)
    ]


def totals(summary: Mapping[str, Any]) -> dict[str, str]:
    """The figures that are one number."""
    shown = {
        "Completed": f"{summary['num_completed']:,} of {summary['num_requests']:,}",
        **({"Cut off at the end": f"{summary['num_cut']:,}"} if summary["num_cut"] else {}),
        "Duration": f"{summary['duration_s']:,.2f} s",
        "Requests": f"{summary['request_throughput']:,.2f} req/s",
        "Output tokens": f"{summary['output_token_throughput']:,.1f} tok/s",
        "All tokens": f"{summary['total_token_throughput']:,.1f} tok/s",
        "Most at once": f"{summary['max_concurrency']:,}",
    }
    if summary["goodput"] is not None:
        slo = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["slo_ms"].items())
        shown[f"Goodput ({slo})"] = f"{summary['goodput']:,.2f} req/s"
    return shown


def html(result: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The page. It loads nothing, and all text in it is escaped."""
    summary = result["summary"]
    tiles = "".join(
        f'<div class="tile"><small>{escape(name)}</small><b>{escape(value)}</b></div>'
        for name, value in totals(summary).items()
    )
    notes = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings(summary))
    config = escape(json.dumps(result["config"], indent=2))
    title = f"{result['config']['model']} at {result['config']['server']}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>quire bench: {escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>quire bench, {escape(result['date'])}</p>{notes}"
        f'<div class="tiles">{tiles}</div>'
        f"<h2>Latencies</h2>{_table(('', *FIGURES), latency_rows(summary))}"
        f'{_errors(summary)}<h2>Distributions and time</h2><div class="charts">'
        f"{''.join(_charts(records, summary['duration_s']))}</div>"
        f"<h2>Configuration</h2><details><summary>as JSON</summary><pre>{config}</pre></details>"
        "</html>\n"
    )


def _table(
    header: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = "numbers"
) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (name, *cells)) + "</tr>"
        for name, cells in rows
    )
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _errors(summary: Mapping[str, Any]) -> str:
    if not summary["errors"]:
        return ""
    messages = summary["error_messages"]
    rows = [(kind, (f"{number:,}", messages[kind])) for kind, number in summary["errors"].items()]
    return f"<h2>Errors</h2>{_table(('kind', 'number', 'the first one'), rows, 'text')}"


def _charts(records: Sequence[Record], duration_s: float) -> list[str]:
    whole = [record for record in records if record.is_whole]
    ttfts = [(record.sent, 1000 * record.ttft_s) for record in whole]
    gaps = [1000 * gap for record in whole for gap in record.gaps_s]
    tpots = [1000 * tpot for record in whole if (tpot := record.tpot_s) is not None]
    share = "% of requests at most this long"
    return [
        chart("Time to first token", "ms", share, [cumulative("TTFT", [y for _, y in ttfts], 1)]),
        chart(
            "Decode",
            "ms",
            "% at most this long",
            [cumulative("inter-token latency", gaps, 2), cumulative("TPOT", tpots, 3)],
        ),
        chart(
            "End to end",
            "ms",
            share,
            [cumulative("latency", [1000 * record.e2e_s for record in whole], 4)],
        ),
        chart(
            "Time to first token over the run",
            "seconds since the start, by when a request was sent",
            "ms",
            [Line("TTFT", thinned(ttfts), 1, as_dots=True)],
        ),
        chart("Chunks", "seconds", "a second", [Line("chunks", _rate(whole, duration_s), 3)]),
        chart(
            "Running requests",
            "seconds",
            "",
            [Line("running", steps(thinned([(0.0, 0), *running(records)])), 2)],
        ),
    ]


def _rate(records: Sequence[Record], duration_s: float) -> list[tuple[float, float]]:
    """Chunks a second, in 60 slices of the run."""
    width = max(duration_s, 1e-9) / 60
    numbers = Counter(min(59, int(at / width)) for record in records for at in record.arrivals)
    return [((index + 0.5) * width, numbers[index] / width) for index in range(60)]
