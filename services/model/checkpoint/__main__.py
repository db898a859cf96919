"""`python -m services.model.checkpoint DIRECTORY`: checks a checkpoint. `quire serve` runs this
before it starts any service. A hostile checkpoint ends this process, at a limit, and no service.

Exit status 2, with one line on stderr: Quire cannot serve the checkpoint.
"""

import resource
import sys
from pathlib import Path

from services.model.checkpoint.check import check
from services.runtime.errors import StartupError

MEMORY_LIMIT_BYTES = 2 << 30
"""Beyond what the check of any published checkpoint takes: 0.6 GB for a vocabulary of 262,144."""

CPU_LIMIT_S = 120


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    try:
        check(Path(sys.argv[1]))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        limit = f"{MEMORY_LIMIT_BYTES >> 30} GiB"
        print(f"error: to read the checkpoint's files takes more than {limit}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
