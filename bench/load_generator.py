"""How many tokens a second `quire bench` can take on one core, one token a chunk.

    python -m bench.load_generator --streams 64 --tokens 400

A synthetic server (`bench.serving.synthetic`) in a process of its own sends each stream a token
every `--itl-ms`. Prints a row of a markdown table: the rate that arrived, and that rate by the CPU
time of the generator, which is what one core can take.
"""

import argparse
import asyncio
import subprocess
import sys
import time

from bench.serving.synthetic import Synthetic
from quire.bench.load import Load
from quire.bench.target import HttpTarget
from quire.bench.workload import Session, Turn


async def measure(url: str, streams: int, num_tokens: int) -> str:
    target = HttpTarget(url, "synthetic", fields={"ignore_eos": True})
    session = Session([Turn(lambda: " word" * 128, num_tokens)])
    load = Load(target)
    began = time.process_time()
    seconds = await load.closed_loop(iter([session] * streams), streams, 0.0, None)
    cpu_s = time.process_time() - began
    await target.close()
    if load.num_failed:
        raise SystemExit(f"{load.num_failed} requests failed: {load.records[0].message}")
    per_s, per_cpu_s = load.num_tokens / seconds, load.num_tokens / cpu_s
    return f"| {streams} | {load.num_tokens:,} | {per_s:,.0f} | {per_cpu_s:,.0f} |"


async def _serve(itl_ms: float) -> None:
    server = await Synthetic(0.005, itl_ms / 1000).serve()
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve(args.itl_ms))
        return
    command = [sys.executable, "-m", "bench.load_generator", "--serve", f"--itl-ms={args.itl_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print("| streams | tokens | tok/s | tok/s of one core |\n|---|---|---|---|")
        for streams in args.streams:
            print(asyncio.run(measure(url, streams, args.tokens)), flush=True)
        server.terminate()


if __name__ == "__main__":
    main()
