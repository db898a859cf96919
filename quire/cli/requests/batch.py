"""`quire batch`: runs a file of requests in OpenAI's batch format, in one process.

A separate process, `python -m services.offline`, does the work, because this package does not
import PyTorch.
"""

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from quire.module_command import module_command
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
    """The flags of `quire batch` that are also flags of `python -m services.offline`."""

    model: Annotated[str, Option(metavar="DIR|FILE|ID", help="as for `quire serve`")] = DEMO


def batch(
    input_file: Annotated[Path, Argument(metavar="IN", help="JSON lines of requests")],
    output_file: Annotated[
        Path, Argument(metavar="OUT", help="gets an answer a line; a run that stopped continues")
    ],
    asked: BatchFlags,
) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server."""
    find_model(asked.model)  # before PyTorch is imported, which takes seconds
    command = module_command("services.offline", str(input_file), str(output_file), **asdict(asked))
    return subprocess.run(command, check=False).returncode
