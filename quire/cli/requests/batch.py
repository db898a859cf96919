"""`quire batch`: runs a file of requests in OpenAI's batch format, in one process.

A separate process, `python -m services.offline`, does the work, because this package does not
import PyTorch.
"""

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from quire.choices import Dtype, KvDtype, Quantize
from quire.module_command import module_command
from quire.sizes import memory_size
from quire.supervisor.model_source import DEMO, find_model


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """The flags of `quire batch` that are also flags of `python -m services.offline`."""

    model: Annotated[str, Option(metavar="DIR|FILE|ID", help="as for `quire serve`")] = DEMO
    pool_memory: Annotated[
        str | None, Option(metavar="SIZE", parser=memory_size, help="the pool's KV memory")
    ] = None
    dtype: Dtype | None = None
    quantize: Quantize | None = None
    kv_dtype: KvDtype | None = None
    max_model_len: Annotated[
        int | None, Option(min=2, metavar="TOKENS", help="longest prompt + generation")
    ] = None
    max_num_seqs: Annotated[
        int | None, Option(min=1, metavar="N", help="sequences of one step; default: 64")
    ] = None
    threads: Annotated[
        int | None, Option(min=1, metavar="N", help="threads that compute; default: one per core")
    ] = None
    weights_cache: Annotated[
        str | None, Option(metavar="DIR", help="as for `quire serve`; default: ~/.cache/quire")
    ] = None


def batch(
    input_file: Annotated[Path, Argument(metavar="IN", help="JSON lines of requests")],
    output_file: Annotated[
        Path, Argument(metavar="OUT", help="gets an answer a line; a run that stopped continues")
    ],
    flags: BatchFlags,
) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server."""
    find_model(flags.model)  # before PyTorch is imported, which takes seconds
    command = module_command("services.offline", str(input_file), str(output_file), **asdict(flags))
    return subprocess.run(command, check=False).returncode
