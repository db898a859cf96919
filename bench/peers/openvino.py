"""OpenVINO GenAI's continuous batching, with a checkpoint exported by optimum-intel.

Its OpenAI server (OpenVINO Model Server) is on no package index, so that a small one of ours stands
around the pipeline (`bench/peers/inside/openvino_server.py`). Int8 is weights per channel, with
activations quantized as they come.
"""

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
    ),
    unwanted=("torchvision",),  # not needed, and built for another PyTorch build
)


class OpenVino:
    name = "openvino"
    dtypes: tuple[Dtype, ...] = ("bfloat16", "int8")

    @property
    def is_ready(self) -> bool:
        return _ENVIRONMENT.is_ready

    def setup(self) -> None:
        _ENVIRONMENT.create()

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        directory = converted_directory(self.name, checkpoint, dtype)
        if not directory.exists():
            unfinished = directory.with_name(f"{directory.name}-unfinished")
            # 16 bits of storage: the plugin computes in bfloat16 by its own conversion
            weights = "int8" if dtype == "int8" else "fp16"
            program = str(_ENVIRONMENT.path / "bin" / "optimum-cli")
            options = ("--task", "text-generation-with-past", "--weight-format", weights)
            export = (program, "export", "openvino", "--model", str(checkpoint), *options)
            output_of(Command((*export, str(unfinished)), {"HF_HUB_OFFLINE": "1"}))
            unfinished.rename(directory)
        return directory

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        options = (*run.arguments, *_int8(dtype))
        return figures(self._command("engine.py", "openvino", "--model", str(model), *options))

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": str(model),
            "--port": str(options.port),
            "--threads": str(options.threads),
            "--max-num-seqs": str(options.max_num_seqs),
        }
        words = (word for flag in flags.items() for word in flag)
        return self._command("openvino_server.py", *words, *_int8(dtype))

    def _command(self, script: str, *arguments: str) -> Command:
        return Command((str(_ENVIRONMENT.python), str(_INSIDE / script), *arguments))


def _int8(dtype: Dtype) -> tuple[str, ...]:
    return ("--int8",) if dtype == "int8" else ()
