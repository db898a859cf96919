"""The groups of checks, and how a group runs."""

import json
import time
import traceback
from collections.abc import Callable, Iterator

from bench.gpu import (
    arena,
    attention,
    decode,
    deployment,
    environment,
    experts,
    model,
    operations,
    peers,
    ranks,
    sampling,
    sharing,
    speed,
)
from bench.gpu.check import Check, Failed, Machine, Skipped

GROUPS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "environment": environment.checks,
    "attention": attention.checks,
    "operations": operations.checks,
    "experts": experts.checks,
    "arena": arena.checks,
    "sharing": sharing.checks,
    "peers": peers.checks,
    "sampling": sampling.checks,
    "model": model.checks,
    "ranks": ranks.checks,
    "decode": decode.checks,
    "speed": speed.checks,
    "deployment": deployment.checks,
}


def run_group(group: str, dry_run: bool) -> None:
    """Print the result of each check as a line of JSON. An error fails its check only."""
    machine = Machine(dry_run)
    for name, check in GROUPS[group](machine):
        began, figures = time.monotonic(), {}
        try:
            passed = check()
            machine.synchronize()
            status, detail, figures = "ok", passed.detail, passed.figures
        except Skipped as skipped:
            status, detail = "skipped", str(skipped)
        except Failed as failed:
            status, detail = "FAILED", str(failed)
        except Exception as error:
            traceback.print_exc()
            status, detail = "FAILED", f"{type(error).__name__}: {error}"
        result = {
            "name": name,
            "status": status,
            "detail": " ".join(detail.split())[:300],
            "seconds": round(time.monotonic() - began, 2),
            "figures": figures,
        }
        print(json.dumps(result), flush=True)
