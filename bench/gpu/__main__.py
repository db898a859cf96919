"""Runs each group of checks in a process of its own, with a time limit, and reports all results.

A kernel that reads wrong memory breaks its process's CUDA context; so it breaks only its group. The
results are written after each check: a run that is stopped leaves those that it has.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

TOTAL_S = 570
"""For everything. The limits of the groups leave time to compile Triton's kernels."""

GROUPS = {
    "environment": 120,  # the first import of PyTorch reads gigabytes
    "attention": 200,
    "operations": 100,
    "linears": 120,
    "experts": 100,
    "arena": 100,
    "sharing": 150,
    "peers": 60,
    "sampling": 120,
    "model": 150,
    "decode": 150,
    "speed": 150,
    "deployment": 180,
    "loads": 400,  # makes and loads 16 GB of weights
}
"""Group -> its limit in seconds; what matters most comes first."""

Result = dict[str, Any]


class Stopped(Exception):
    """This process got a signal."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description="Checks a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny, interpreted, on the CPU")
    folder = Path(os.environ.get("OUT", "."))
    parser.add_argument("--json", type=Path, default=folder / "gpu_check.json", help="results")
    parser.add_argument("--only", choices=GROUPS, help="this group, after the environment")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.group:
        from bench.gpu.groups import run_group

        run_group(args.group, args.dry_run)
        return 0
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    began = time.monotonic()
    results: list[Result] = []

    def add(group: str, result: Result) -> None:
        results.append({"group": group, **result})
        _write(results, args.json, args.dry_run, time.monotonic() - began)
        status, name, detail = result["status"], result["name"], result["detail"]
        print(f"{status:7} {result['seconds']:6.1f} s  {group}: {name}: {detail}", flush=True)

    group = ""
    try:
        for group, limit_s in GROUPS.items():
            if args.only not in (None, group) and group != "environment":
                continue
            left_s = TOTAL_S - (time.monotonic() - began)
            with closing(_group(group, args.dry_run, min(limit_s, left_s))) as found:
                for result in found:
                    add(group, result)
            if group == "environment" and results[-1]["status"] != "ok":
                break
    except Stopped as stopped:
        add(group, _failed("the run", f"stopped by {stopped}", time.monotonic() - began))
    return _report(results, args.json, args.dry_run, time.monotonic() - began)


def _stop(signum: int, _frame: object) -> None:
    raise Stopped(signal.Signals(signum).name)


def _write(
    results: list[Result], path: Path, dry_run: bool, seconds: float, code: int | None = None
) -> None:
    """`code`: the exit status; None: the run goes on."""
    report = {"dry_run": dry_run, "seconds": seconds, "exit_status": code, "results": results}
    path.write_text(json.dumps(report, indent=1) + "\n")


def _report(results: list[Result], path: Path, dry_run: bool, seconds: float) -> int:
    counts = Counter(result["status"] for result in results)
    can_run = results[0]["status"] == "ok"  # the environment
    code = (1 if counts["FAILED"] else 0) if can_run else 2
    _write(results, path, dry_run, seconds, code)
    totals = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"{totals}; {seconds:.0f} s; results in {path}")
    return code


def _group(group: str, dry_run: bool, limit_s: float) -> Generator[Result, None, None]:
    """Give the group's results as they come. A group that does not finish fails. It ends with all
    processes that it has started: they would hold the GPU, and its output."""
    if limit_s <= 0:
        yield _failed("the group", f"not run: the others took {TOTAL_S} s", 0.0)
        return
    command = [sys.executable, "-m", "bench.gpu", "--group", group]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if dry_run else {})}
    began = time.monotonic()
    with subprocess.Popen(
        command + ["--dry-run"] * dry_run,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit_s, _end, (process.pid,))
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process.pid)
    seconds = time.monotonic() - began
    if code and seconds >= limit_s:
        yield _failed("the group", f"stopped after its limit of {limit_s:.0f} s", seconds)
    elif code:
        yield _failed("the group", f"its process ended with status {code}", seconds)


def _end(session: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _failed(name: str, detail: str, seconds: float) -> Result:
    return {"name": name, "status": "FAILED", "detail": detail, "seconds": seconds, "figures": {}}


if __name__ == "__main__":
    sys.exit(main())
