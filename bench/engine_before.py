"""The engine of this checkout beside that of an older one, in turn.

    python -m bench.engine_before OLDER_CHECKOUT --model DIR --streams 1 8 16 --prefill 512

Each checkout needs its own `.venv` (`make setup`). One process of each has the model loaded; they
work one after the other, never at the same time, and alternate who begins. A pair is --steps steps
of decode, or one prompt, of each. The ratio is the median of the pairs' ratios of seconds, newer by
older: below 1 the newer one is faster. Speeds of a machine that others use change within seconds,
pairs much less.
"""

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTEXT = 384
PROMPT = 128


class Checkout:
    """A process that runs the engine of a checkout. Ends with the `with` block."""

    def __init__(self, root: Path, options: list[str]) -> None:
        program = [str(root / ".venv/bin/python"), "-P", __file__, "--serve", *options]
        self._process = subprocess.Popen(
            program, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def seconds(self, what: str, size: int, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, size, steps]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args!r} ended: {self._process.wait()}")
        return float(answer)


def serve(options: list[str]) -> None:
    """Answer each line of stdin, which names work, with the seconds that it took. Runs with the
    code of either checkout, so it uses only what both have."""
    from bench import engine

    args = engine.parser().parse_args(["decode", *options])
    loaded: Any = engine.load(args)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    extra = [False] * (len(inspect.signature(engine.Bench).parameters) - 3)
    benches: dict[tuple[str, int], Any] = {}
    for line in sys.stdin:
        what, size, steps = json.loads(line)
        if (what, size) not in benches:
            rows, length = (size, CONTEXT) if what == "decode" else (1, max(CONTEXT, size))
            benches[what, size] = bench = engine.Bench(model, rows, length, *extra)
            for row in range(rows):
                bench.prefill([7 + row] * PROMPT, 512, row)
        print(sum(_work(benches[what, size], what, size, steps)), flush=True)


def _work(bench: Any, what: str, size: int, steps: int) -> Iterator[float]:
    if what == "decode":
        yield from bench.decode([9] * size, PROMPT, steps)
        return
    prompt = bench.prompt(size)
    began = time.perf_counter()
    bench.prefill(prompt, 512)
    yield time.perf_counter() - began


def main() -> None:
    if "--serve" in sys.argv:
        serve([argument for argument in sys.argv[1:] if argument != "--serve"])
        return
    from bench.engine_pairs import in_turn  # an older checkout may not have it

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("older", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", default="2")
    args = parser.parse_args()
    options = ["--model", str(args.model.resolve()), "--threads", args.threads]
    work = [("decode", size) for size in args.streams] + [("prefill", n) for n in args.prefill]
    with Checkout(args.older, options) as older, Checkout(Path.cwd(), options) as newer:
        for what, size in work:
            for side in (older, newer):
                side.seconds(what, size, args.steps)

            def step(_: int, is_new: bool, what: str = what, size: int = size) -> float:
                return (newer if is_new else older).seconds(what, size, args.steps)

            pairs = in_turn(f"{what} {size}", size if what == "decode" else 1, args.rounds, step)
            print(f"{pairs.what}: newer / older {pairs.ratio:.3f}, {args.rounds} pairs", flush=True)


if __name__ == "__main__":
    main()
