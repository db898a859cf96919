"""`quire batch`: runs a file of requests in OpenAI's batch format, in this process."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from quire.options.flag import flags
from quire.options.worker import WorkerOptions
from quire.supervisor.model_source import DEMO, find_model

_NAMES = (
    *("pool_memory", "dtype", "quantize", "kv_dtype", "max_model_len", "max_num_seqs"),
    *("threads", "weights_cache"),
)
WorkerFlags = flags("WorkerFlags", {name: WorkerOptions.model_fields[name] for name in _NAMES})


@dataclass(frozen=True)
class BatchFlags(WorkerFlags):  # type: ignore[misc, valid-type]  # made from `quire.options`
    """The model, and settings of its engine."""

    model: Annotated[str, Option(metavar="DIR|FILE|ID", help="as for `quire serve`")] = DEMO


def batch(
    input_file: Annotated[Path, Argument(metavar="IN", help="JSON lines of requests")],
    output_file: Annotated[
        Path, Argument(metavar="OUT", help="gets an answer a line; a run that stopped continues")
    ],
    asked: BatchFlags,
) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server.

    The body of a request has no "model", or the name by which `quire serve` would serve it: that
    of the directory or file, the Hugging Face id, or SmolLM2-135M-Instruct for `demo`. A request
    with an answer in OUT, even an error, is not answered again.

    Exit status: 1 if OUT has errors or the model cannot run here, 2 if a file is not usable.
    """
    find_model(asked.model)  # before PyTorch is imported, which takes seconds
    from services.offline.batch import BatchError, answer_file

    try:
        return 1 if answer_file(input_file, output_file, **asdict(asked)) else 0
    except BatchError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command answers the rest", file=sys.stderr)
        raise
