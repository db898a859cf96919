"""A mover of a pool in the host's memory runs without PyTorch, which its image does not have."""

import subprocess
import sys

_PROGRAM = """
import sys

sys.modules.update({"torch": None, "kvops": None})  # any import of them fails
import services.mover.process
from services.mover.nixl_transport import NixlTransport

transport = NixlTransport("without-torch")
blocks, stamps = transport.allocate(2, 4096, 4), transport.allocate(1, 64, 4)
assert transport.share(blocks, stamps)
transport.prepare(blocks)
transport.close()
print("it runs")
"""


def test_nixl_and_the_mover_need_no_torch() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("it runs\n"), done.stdout + done.stderr
