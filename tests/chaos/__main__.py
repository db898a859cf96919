"""Torment a system for some minutes; exit status 1, with what replays it, when it did harm.

python -m tests.chaos [--minutes 5] [--seed 1] [--kinds "kill decode,stop decode"]
"""

import argparse
import sys

from tests.chaos.harness import in_a_temporary_directory
from tests.chaos.schedule import KINDS, USUAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kinds", default=",".join(USUAL), help=f"of events, with commas: {', '.join(KINDS)}"
    )
    args = parser.parse_args()
    kinds = [kind.strip() for kind in args.kinds.split(",")]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such event: {', '.join(sorted(unknown))}")
    report = in_a_temporary_directory(args.seed, 60 * args.minutes, kinds)
    print(report)
    sys.exit(1 if report.tally.faults else 0)


if __name__ == "__main__":
    main()
