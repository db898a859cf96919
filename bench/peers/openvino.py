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


class OpenVino:
    formats: Mapping[Dtype, str] = {"bfloat16": "bf16", "int8": "int8", "int4": "int4 by 128"}

    def __init__(self, name: str = "openvino", activation_group: int = 32) -> None:
        """`activation_group` inputs share a scale of int8 activations beside quantized weights; 0
        keeps activations in bfloat16."""
        self.name = name
        self._activation_group = activation_group

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
        options = (*run.arguments, *self._activations(dtype))
        return figures(self._command("engine.py", "openvino", "--model", str(model), *options))

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": str(model),
            "--port": str(options.port),
            "--threads": str(options.threads),
            "--max-num-seqs": str(options.max_num_seqs),
        }
        words = (word for flag in flags.items() for word in flag)
        return self._command("openvino_server.py", *words, *self._activations(dtype))

    def quality(self, model: Path, dtype: Dtype, texts: Path) -> Command:
        """A program that prints what the model says about the texts of a JSON file."""
        options = ("--model", str(model), "--texts", str(texts), *self._activations(dtype))
        return self._command("openvino_quality.py", *options)

    def _activations(self, dtype: Dtype) -> tuple[str, ...]:
        return () if dtype == "bfloat16" else ("--activation-group", str(self._activation_group))

    def _command(self, script: str, *arguments: str) -> Command:
        return Command((str(_ENVIRONMENT.python), str(_INSIDE / script), *arguments))
