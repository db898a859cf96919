"""OpenVINO GenAI's continuous batching, with a checkpoint exported by optimum-intel.

Its OpenAI server (OpenVINO Model Server) is on no package index, so that a small one of ours stands
around the pipeline (`bench/peers/inside/openvino_server.py`). Int8 is weights per channel, int4 is
NNCF's asymmetric kind with a scale for each group of 128 inputs and an int8 head. Beside both,
activations become int8 as they come, in groups of 32, which is the plugin's default; as the peer
`openvino-16` they stay in bfloat16, which is slower and better (`bench/quality.py`).
"""

from collections.abc import Mapping
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.peer import (
    Command,
    Dtype,
    EngineRun,
    Figure,
    Peer,
    ServerOptions,
    converted_directory,
    figures,
    output_of,
)

_INSIDE = Path(__file__).parent / "inside"
_ENVIRONMENT = Environment(
    "openvino",
    (
        "openvino-genai==2026.4.1.0",
        "optimum-intel[openvino]==2.2.0",
        "torch==2.13.0",
        "uvicorn==0.54.0",
        "starlette==1.10.0",
    ),
    unwanted=("torchvision",),  # not needed, and built for another PyTorch build
)
_WEIGHTS: dict[Dtype, tuple[str, ...]] = {
    # 16 bits of storage: the plugin computes in bfloat16 by its own conversion
    "bfloat16": ("fp16",),
    "int8": ("int8",),
    # what optimum-intel does with a model that it has no settings for, said here to stay so; groups
    # of a linear whose inputs are no multiple of 128 are smaller
    "int4": ("int4", "--group-size", "128", "--ratio", "1.0", "--group-size-fallback", "adjust"),
}


class OpenVino(Peer):
    formats: Mapping[Dtype, str] = {"bfloat16": "bf16", "int8": "int8", "int4": "int4 by 128"}
    environment = _ENVIRONMENT

    def __init__(self, name: str = "openvino", activation_group: int = 32) -> None:
        """`activation_group` inputs share a scale of int8 activations beside quantized weights; 0
        keeps activations in bfloat16."""
        self.name = name
        self._activation_group = activation_group

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        directory = converted_directory("openvino", checkpoint, dtype)
        if not directory.exists():
            unfinished = directory.with_name(f"{directory.name}-unfinished")
            program = _ENVIRONMENT.path / "bin" / "optimum-cli"
            flags = {"--model": checkpoint, "--task": "text-generation-with-past"}
            weights = ("--weight-format", *_WEIGHTS[dtype])
            words = (program, "export", "openvino", flags, *weights, unfinished)
            output_of(Command.of(*words, HF_HUB_OFFLINE="1"))
            unfinished.rename(directory)
        return directory

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        return figures(self._command(dtype, "engine.py", "openvino", {"--model": model}, run.flags))

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": model,
            "--port": options.port,
            "--threads": options.threads,
            "--max-num-seqs": options.max_num_seqs,
        }
        return self._command(dtype, "openvino_server.py", flags)

    def quality(self, model: Path, dtype: Dtype, texts: Path) -> Command:
        """A program that prints what the model says about the texts of a JSON file."""
        return self._command(dtype, "openvino_quality.py", {"--model": model, "--texts": texts})

    def _command(self, dtype: Dtype, script: str, *words: object) -> Command:
        group = {} if dtype == "bfloat16" else {"--activation-group": self._activation_group}
        return Command.of(_ENVIRONMENT.python, _INSIDE / script, *words, group)
