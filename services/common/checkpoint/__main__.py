"""`python -m services.common.checkpoint DIRECTORY`: checks a checkpoint. `quire serve` runs this
before it starts any service.

Exit status 2, with one line on stderr: Quire cannot serve the checkpoint.
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
