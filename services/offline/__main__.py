"""`python -m services.offline IN OUT`: the process behind `quire batch`, which may import PyTorch.

Exit status: 0 if all requests succeeded, 1 if some failed or the model cannot run here, 2 if a file
is not usable.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

from quire.errors import QuireError
from services.offline.batch import BatchError, answer_whole, answered_ids, read_requests, run_batch
from services.offline.llm import LLM

_SETTINGS = (
    *("dtype", "kv_dtype", "quantize", "pool_memory", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "threads", "isa", "weights_cache"),
)
"""Flags that are settings of the workers."""


def main() -> None:
    args = _parser().parse_args()
    try:
        sys.exit(_run(args))
    except BatchError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(2)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; the same command answers the rest", file=sys.stderr)
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="demo")
    for name in _SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}")
    return parser


def _run(args: argparse.Namespace) -> int:
    requests = read_requests(args.input)
    answered = answered_ids(args.output, requests)
    left = [request for request in requests if request.custom_id not in answered]
    settings = {name: getattr(args, name) for name in _SETTINGS}
    try:
        output = args.output.open("ab", buffering=0)
    except OSError as error:
        raise BatchError(f"{args.output}: {error.strerror}") from error
    bar = tqdm(total=len(requests), initial=len(answered), desc="Batch")
    with output, LLM(args.model, **settings) as llm, bar:
        answer = partial(answer_whole, llm.engine)
        num_failed = llm.run(run_batch(answer, left, output, llm.num_at_once, bar.update))
    print(f"{len(left)} answered, {num_failed} of them with an error; {len(answered)} before")
    return 1 if num_failed else 0


if __name__ == "__main__":
    main()
