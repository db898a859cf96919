"""llama.cpp, built for this machine from the sources that the package llama-cpp-python carries.

`llama-batched-bench` measures the engine, `llama-server` serves. Weights go into a GGUF file: as
they are (bfloat16), as Q8_0 (int8 in blocks of 32, a scale each), or as Q4_0 (int4 in blocks of 32,
a scale each, and a head of 6 bits).
"""

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers.environment import DIRECTORY, Environment, run
from bench.peers.peer import (
    Command,
    Dtype,
    EngineRun,
    Figure,
    Peer,
    PeerFailed,
    ServerOptions,
    best_of,
    converted_directory,
    json_lines,
    output_of,
)

_PACKAGE = "llama-cpp-python==0.3.36"
_TARGETS = ("llama-server", "llama-batched-bench", "llama-quantize")
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # the web page of the server would be downloaded
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_NUMBER=0",
    "-DLLAMA_BUILD_COMMIT=sdist",
)
# only converts: the programs are C++
_ENVIRONMENT = Environment(
    "llamacpp",
    (
        "torch==2.13.0",
        "transformers==5.23.0",
        "sentencepiece==0.2.2",
        "numpy",
        "cmake",
        "ninja",
    ),
)
_SOURCE = DIRECTORY / "llamacpp-source"
_PROGRAMS = _SOURCE / "build" / "bin"
_CONVERT = Path(__file__).parent / "inside" / "llamacpp_convert.py"


class LlamaCpp(Peer):
    name = "llama.cpp"
    formats: Mapping[Dtype, str] = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
    environment = _ENVIRONMENT

    @property
    def is_ready(self) -> bool:
        return super().is_ready and all((_PROGRAMS / target).exists() for target in _TARGETS)

    def setup(self) -> None:
        super().setup()
        if not _SOURCE.exists():
            self._fetch()
        if not self.is_ready:
            self._compile()

    def _fetch(self) -> None:
        """The package's sources have llama.cpp's whole tree in `vendor/`."""
        pip = (str(_ENVIRONMENT.python), "-m", "pip", "download", "--quiet", "--no-deps")
        downloads = DIRECTORY / "downloads"
        run(*pip, "--no-binary", "llama-cpp-python", "--dest", str(downloads), _PACKAGE)
        (archive,) = downloads.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(downloads, filter="data")
        tree = downloads / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        tree.rename(_SOURCE)
        shutil.rmtree(downloads)

    def _compile(self) -> None:
        cmake = str(_ENVIRONMENT.path / "bin" / "cmake")
        ninja = _ENVIRONMENT.path / "bin" / "ninja"
        generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
        run(cmake, "-S", ".", "-B", "build", *generator, *_CMAKE_OPTIONS, cwd=_SOURCE)
        jobs = str(os.cpu_count() or 1)
        run(cmake, "--build", "build", "-j", jobs, "--target", *_TARGETS, cwd=_SOURCE)

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        directory = converted_directory(self.name, checkpoint, dtype)
        model = directory / "model.gguf"
        if not model.exists():
            directory.mkdir(parents=True, exist_ok=True)
            unfinished = directory / "unfinished.gguf"
            output_of(self._conversion(checkpoint, dtype, unfinished))
            unfinished.rename(model)
        return model

    def _conversion(self, checkpoint: Path, dtype: Dtype, gguf: Path) -> Command:
        """The converter writes no types of 4 bits: `llama-quantize` makes them from bfloat16."""
        if dtype == "int4":
            whole = LlamaCpp().prepare(checkpoint, "bfloat16")
            return Command.of(_PROGRAMS / "llama-quantize", whole, gguf, self.formats[dtype])
        flags = {"--outtype": self.formats[dtype].lower(), "--outfile": gguf}
        return Command.of(_ENVIRONMENT.python, _CONVERT, _SOURCE, flags, checkpoint)

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        lines: list[Figure] = []
        if run.decode:
            rows = self._bench(model, run, (run.prompt,), run.tokens, run.decode)
            lines += [Figure("decode", row["pl"], row["speed_tg"]) for row in rows]
        if run.prefill:
            rows = self._bench(model, run, run.prefill, 1, (1,))
            lines += [Figure("prefill", row["pp"], row["speed_pp"]) for row in rows]
        return best_of(lines)

    def _bench(
        self,
        model: Path,
        run: EngineRun,
        prompts: tuple[int, ...],
        tokens: int,
        streams: tuple[int, ...],
    ) -> list[dict[str, Any]]:
        """One row for each prompt length and number of streams, `run.repeats` times."""
        flags = {
            "--model": model,
            "--ctx-size": max(streams) * (max(prompts) + tokens),
            "--batch-size": max(*prompts, 2048),
            "-npp": ",".join(map(str, prompts)),
            "-ntg": tokens,
            "-npl": ",".join(map(str, streams * run.repeats)),
            "--threads": run.threads,
            "--output-format": "jsonl",
        }
        program = _PROGRAMS / "llama-batched-bench"
        rows = json_lines(output_of(Command.of(program, flags)))
        if not rows:
            raise PeerFailed(f"no figure: {program}")
        return rows

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": options.port,
            "--threads": options.threads,
            "--parallel": options.max_num_seqs,
            # one cache for all streams: a stream may have all of it
            "--ctx-size": options.num_kv_tokens,
        }
        return Command.of(_PROGRAMS / "llama-server", flags, "--kv-unified")
