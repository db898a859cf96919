"""NIXL alone: one process reads blocks from the memory of another, with nothing of Quire.

    python -m bench.nixl_alone serve NUM_BLOCKS BLOCK_BYTES
    python -m bench.nixl_alone read NUM_BLOCKS BLOCK_BYTES DESCRIPTION

The server prints its description as one line, and answers reads until its standard input ends. The
reader prepares a descriptor for each block, as a mover does, reads all blocks in one request, and
prints the seconds of each of two reads; a read before them connects. Both processes call UCX
without a pause: the server in NIXL's progress thread, the reader while it waits.
"""

import argparse
import json
import sys
import time
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config


def _registered(agent: Any, num_bytes: int) -> Any:
    memory = np.ones(num_bytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return memory


def serve(num_blocks: int, block_bytes: int) -> None:
    agent = nixl_agent("server", nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    memory = _registered(agent, num_blocks * block_bytes)
    described = b64encode(agent.get_agent_metadata()).decode(), memory.ctypes.data
    print(json.dumps(described), flush=True)
    sys.stdin.read()


def read(num_blocks: int, block_bytes: int, description: str) -> list[float]:
    metadata, address = json.loads(description)
    agent = nixl_agent("reader", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    memory = _registered(agent, num_blocks * block_bytes)
    server = agent.add_remote_agent(b64decode(metadata))

    def prepared(name: str, start: int) -> Any:
        described = np.array([(start, block_bytes, 0, block_bytes, num_blocks)], np.uint64)
        return agent.prep_xfer_dlist(name, described, "DRAM")

    here, there = prepared("NIXL_INIT_AGENT", memory.ctypes.data), prepared(server, address)
    seconds = []
    for number in (1, num_blocks, num_blocks):
        blocks = np.arange(number, dtype=np.int32)
        began = time.perf_counter()
        transfer = agent.make_prepped_xfer("READ", here, blocks, there, blocks)
        agent.transfer(transfer)
        while (state := agent.check_xfer_state(transfer)) == "PROC":
            pass
        if state != "DONE":
            raise SystemExit(f"a read ended with {state}")
        seconds.append(time.perf_counter() - began)
        agent.release_xfer_handle(transfer)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nixl_alone")
    parser.add_argument("role", choices=("serve", "read"))
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("description", nargs="?", default="")
    asked = parser.parse_args()
    if asked.role == "serve":
        serve(asked.num_blocks, asked.block_bytes)
    else:
        print(json.dumps(read(asked.num_blocks, asked.block_bytes, asked.description)))


if __name__ == "__main__":
    main()
