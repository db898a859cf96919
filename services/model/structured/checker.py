"""The program that checks structures for a gateway: it compiles each within limits of the operating
system. One that crashes it, or is beyond a limit, ends this process and nothing else.

    python -m services.model.structured.checker MODEL_DIRECTORY VOCAB_SIZE EOS_TOKEN_ID...

It reads a structure from each line of its input, and writes a line for each: `null`, or the path of
a fault in the structure's schema and what is wrong there. A `null` before them says that it is
ready. It ends with its input.
"""

import json
import resource
import sys
from pathlib import Path

from services.model.structured.faults import find_fault
from services.model.structured.structure import Structure, StructureKind
from services.model.structured.vocabulary import Vocabulary

CPU_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 1 << 27
"""For one structure, beside what the process has already."""


def main() -> None:
    directory, vocab_size, *eos_token_ids = sys.argv[1:]
    vocabulary = Vocabulary.load(Path(directory), int(vocab_size), list(map(int, eos_token_ids)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("null", flush=True)
    for line in sys.stdin:
        _limit_cpu()
        _limit_memory()
        kind, text = json.loads(line)
        fault = find_fault(Structure(StructureKind(kind), text), vocabulary)
        print(json.dumps(fault), flush=True)


def _limit_cpu() -> None:
    """The kernel ends this process once it has computed for `CPU_LIMIT_S` from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + 1 + CPU_LIMIT_S, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    """An allocation beyond the limit fails, which ends this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    (used_kb,) = (int(line.split()[1]) for line in status if line.startswith("VmData:"))
    limit = used_kb * 1024 + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
