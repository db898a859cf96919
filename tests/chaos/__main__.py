"""Disturb a deployment for some minutes; exit status 1, with the command that replays the run, if a
client noticed.

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
    parser.add_argument("--kinds", help="of events, with commas; default: all")
    parser.add_argument("--log", type=Path, help="where to keep the services' logs")
    system = parser.add_mutually_exclusive_group()
    system.add_argument("--device", default="cpu", help="memfd:0: a pool that is kept as on a GPU")
    system.add_argument("--hosts", action="store_true", help="two hosts, on a wire (needs root)")
    args = parser.parse_args()
    known = hosts.KINDS if args.hosts else schedule.KINDS
    kinds = [kind.strip() for kind in args.kinds.split(",")] if args.kinds else known
    if unknown := set(kinds) - set(known):
        parser.error(f"no such event: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    # Whoever ends us ends what we have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    unleash = hosts.unleash if args.hosts else partial(harness.unleash, device=args.device)
    run = partial(unleash, seed=args.seed, duration_s=60 * args.minutes, kinds=kinds)
    report = harness.in_a_temporary_directory(run, args.log)
    print(report)
    sys.exit(1 if report.tally.faults else 0)


if __name__ == "__main__":
    main()
