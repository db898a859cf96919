"""Disturb a deployment for some minutes; exit status 1, with the command that replays the run, if a
client noticed.

    python -m tests.chaos [--minutes 5] [--seed 1] [--kinds "kill decode,stop decode"] [--log FILE]
                          [--device memfd:0]
"""

import argparse
import signal
import sys
from pathlib import Path

from tests.chaos.harness import in_a_temporary_directory
from tests.chaos.schedule import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"of events, with commas: {', '.join(KINDS)}"
    )
    parser.add_argument("--log", type=Path, help="where to keep the services' log")
    parser.add_argument("--device", default="cpu", help="memfd:0: a pool that is kept as on a GPU")
    args = parser.parse_args()
    kinds = [kind.strip() for kind in args.kinds.split(",")]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such event: {', '.join(sorted(unknown))}")
    # Whoever ends us ends what we have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = in_a_temporary_directory(args.seed, 60 * args.minutes, kinds, args.log, args.device)
    print(report)
    sys.exit(1 if report.tally.faults else 0)


if __name__ == "__main__":
    main()
