"""OpenVINO GenAI's continuous batching, with a checkpoint exported by optimum-intel.

Its OpenAI server (OpenVINO Model Server) is on no package index, so that a small one of ours stands
around the pipeline (`bench/peers/inside/openvino_server.py`). Int8 is weights per channel, int4 is
NNCF's asymmetric kind with a scale for each group of 128 inputs and an int8 head. Beside both,
activations become int8 as they come, in groups of 32: the plugin's default.
"""

from collections.abc import Mapping
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.peer import (
    Command,
    Dtype,
    EngineRun,
    Figure,
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
    # what optimum-intel does with a model that it has no settings for, said here to stay so
    "int4": ("int4", "--group-size", "128", "--ratio", "1.0"),
}


class OpenVino:
    name = "openvino"
    formats: Mapping[Dtype, str] = {"bfloat16": "bf16", "int8": "int8", "int4": "int4 by 128"}

    @property
    def is_ready(self) -> bool:
        return _ENVIRONMENT.is_ready

    def setup(self) -> None:
        _ENVIRONMENT.create()

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        directory = converted_directory("openvino", checkpoint, dtype)
        if not directory.exists():
            unfinished = directory.with_name(f"{directory.name}-unfinished")
            program = str(_ENVIRONMENT.path / "bin" / "optimum-cli")
            task = ("--task", "text-generation-with-past")
            weights = ("--weight-format", *_WEIGHTS[dtype])
            export = (program, "export", "openvino", "--model", str(checkpoint), *task, *weights)
            output_of(Command((*export, str(unfinished)), {"HF_HUB_OFFLINE": "1"}))
            unfinished.rename(directory)
        return directory

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        options = (*run.arguments, *_quantized(dtype))
        return figures(self._command("engine.py", "openvino", "--model", str(model), *options))

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": str(model),
            "--port": str(options.port),
            "--threads": str(options.threads),
            "--max-num-seqs": str(options.max_num_seqs),
        }
        words = (word for flag in flags.items() for word in flag)
        return self._command("openvino_server.py", *words, *_quantized(dtype))

    def _command(self, script: str, *arguments: str) -> Command:
        return Command((str(_ENVIRONMENT.python), str(_INSIDE / script), *arguments))


def _quantized(dtype: Dtype) -> tuple[str, ...]:
    return () if dtype == "bfloat16" else ("--activation-group", "32")
