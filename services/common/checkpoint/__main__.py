"""`python -m services.common.checkpoint DIRECTORY`: what `quire serve` runs before any service.

Exit status 2, and one line on stderr: the checkpoint cannot be served.
"""

import sys
from pathlib import Path

from services.common.checkpoint.check import check
from services.common.errors import StartupError


def main() -> None:
    try:
        check(Path(sys.argv[1]))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
