"""`python -m advisor`: the process behind `quire advise`, which may import PyTorch.

Prints one JSON object: an answer, or {"error": text} with exit status 1.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.memory import DoesNotFit
from advisor.workload import WorkloadError, read_workload
from blockstore.errors import BlockStoreError
from services.common.errors import StartupError
from services.common.runtime.process import set_up_openmp

if TYPE_CHECKING:  # the module imports PyTorch
    from advisor.block_size import Recommendation


def main() -> None:
    args = _parser().parse_args()
    set_up_openmp(args.threads)
    try:
        print(json.dumps(_block_size(args)))
    except _Failed as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(1)


class _Failed(Exception):
    """The advisor cannot recommend a setting; the text has the reason."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pool-memory", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--redis-url")
    parser.add_argument("--weights-cache", default="~/.cache/quire")
    return parser


def _block_size(args: argparse.Namespace) -> dict[str, Any]:
    try:
        workload = read_workload(args.workload)
        # Imported here because it imports PyTorch, which needs OpenMP to be set up before.
        from advisor.block_size import AdviceRequest, recommend
    except WorkloadError as error:
        raise _Failed(str(error)) from error
    except ModuleNotFoundError as error:
        raise _Failed(
            f"{error.name} is not installed: pip install 'quire-serve[worker]'"
        ) from error
    cache = None if args.weights_cache == "none" else Path(args.weights_cache).expanduser()
    request = AdviceRequest(
        workload=workload,
        model=args.model,
        pool_memory=args.pool_memory,
        dtype=args.dtype,
        quantize=args.quantize,
        backend=args.backend,
        num_threads=args.threads,
        most_requests=args.requests,
        redis_url=args.redis_url,
        weights_cache=cache,
    )
    try:
        found = asyncio.run(recommend(request, _show_progress))
        _show_progress("")
    except (StartupError, DoesNotFit, BlockStoreError) as error:
        raise _Failed(str(error)) from error
    except TimeoutError as error:
        raise _Failed("the embedded Valkey does not answer") from error
    return _as_json(found)


def _as_json(found: "Recommendation") -> dict[str, Any]:
    sizes = [
        {**dataclasses.asdict(cost), "left": found.advice.shares[cost.block_size].product}
        for cost in found.costs
    ]
    return {
        "block_size": found.advice.block_size,
        "reasons": found.advice.reasons,
        "num_requests": found.num_requests,
        "num_slots": found.num_slots,
        "step": dataclasses.asdict(found.step),
        "sizes": sizes,
        "notes": found.notes,
    }


def _show_progress(text: str) -> None:
    """Show progress on a terminal; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r{text:<78}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
