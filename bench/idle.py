"""Measures the cost of a deployment without requests.

    python -m bench.idle [--model demo] [--seconds 60] [--prefill 1] [--decode 1]

Starts `quire serve` by itself, lets it settle, and reads the processor time of each process from
/proc before and after. Prints a markdown table: percent of one core, by process.
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tests.e2e.deployment import serving

_SETTLED_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _name(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    modules = [after for before, after in pairwise(command) if before == "-m"]
    return modules[0] if modules else Path(command[0]).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prefill", default="1")
    parser.add_argument("--decode", default="1")
    args = parser.parse_args()
    sizes = ("--prefill", args.prefill, "--decode", args.decode)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args.model, Path(folder), *sizes) as deployment,
    ):
        time.sleep(_SETTLED_S)
        pids = [deployment.process.pid, *deployment.children()]
        before = {pid: _ticks(pid) for pid in pids}
        time.sleep(args.seconds)
        spent = Counter[str]()
        for pid in pids:
            spent[_name(pid)] += _ticks(pid) - before[pid]
    print("| process | percent of a core |\n|---|---:|")
    for name, ticks in (*spent.items(), ("all", spent.total())):
        print(f"| {name} | {100 * ticks / _TICKS_PER_S / args.seconds:.2f} |")


if __name__ == "__main__":
    main()
