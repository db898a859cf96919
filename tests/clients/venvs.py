"""Virtual environments of clients, each made on first use and kept in build/clients."""

import fcntl
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENVS = ROOT / "build" / "clients"
CONSTRAINTS = ROOT / "deploy" / "constraints-cpu.txt"
"""No client may install PyTorch with CUDA."""

REQUIREMENTS = {
    "anthropic": ("anthropic==2.14.0",),
    "cohere": ("cohere==7.3.1",),
    "openai": ("openai==3.54.0",),
    "langchain-openai": ("langchain-openai==1.6.7",),
    # litellm's `responses` imports mcp, which it does not require.
    "litellm": ("litellm==1.106.2", "mcp==2.3.0"),
    # A tokenizer is all that it needs of transformers, so PyTorch is not installed.
    "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
    "schemathesis": ("schemathesis==4.32.5",),
}
IN_DEV = {"openai": "openai", "grpcio-reflection": "grpcio-reflection"}
"""Clients that this project's own environment has, by their package."""

INSTALL_LIMIT_S = 900


def own_version(client: str) -> str:
    return version(IN_DEV[client])


def client_bin(client: str) -> Path:
    """The `bin` of the client's environment. CalledProcessError: pip cannot install the client."""
    directory = VENVS / client
    wanted = "\n".join(REQUIREMENTS[client])
    done = directory / "requirements"
    VENVS.mkdir(parents=True, exist_ok=True)
    with (VENVS / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
            pip = directory / "bin" / "pip"
            subprocess.run(
                [pip, "install", "--quiet", "--constraint", CONSTRAINTS, *REQUIREMENTS[client]],
                check=True,
                timeout=INSTALL_LIMIT_S,
                capture_output=True,
                text=True,
            )
            done.write_text(wanted)
    return directory / "bin"


def client_version(client: str) -> str:
    return REQUIREMENTS[client][0].partition("==")[2]
