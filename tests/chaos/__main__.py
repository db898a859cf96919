"""Inject faults into a deployment under load; exit status 1 if a client saw more than a delay.

python -m tests.chaos [--minutes 5] [--seed 1] [--kinds "kill decode,stop decode"] [--log FILE]
                      [--device memfd:0 | --hosts]
"""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from tests.chaos import harness, hosts, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="of faults, with commas; default: all")
    parser.add_argument("--log", type=Path, help="where to keep the services' logs")
    system = parser.add_mutually_exclusive_group()
    system.add_argument("--device", default="cpu", help="memfd:0: a pool that is kept as on a GPU")
    system.add_argument(
        "--hosts", action="store_true", help="two hosts, on an emulated network (needs root)"
    )
    args = parser.parse_args()
    known = hosts.FAULT_KINDS if args.hosts else schedule.FAULT_KINDS
    kinds = [kind.strip() for kind in args.kinds.split(",")] if args.kinds else known
    if unknown := set(kinds) - set(known):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    # SIGTERM ends the run as Ctrl+C does, so that the deployment ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_chaos = hosts.run_chaos if args.hosts else partial(harness.run_chaos, device=args.device)
    run = partial(run_chaos, seed=args.seed, duration_s=60 * args.minutes, kinds=kinds)
    report = harness.in_a_temporary_directory(run, args.log)
    print(report)
    sys.exit(1 if report.tally.violations else 0)


if __name__ == "__main__":
    main()
