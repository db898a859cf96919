"""The interface of a peer: a set-up, its own form of a checkpoint, runs of its engine, a server.

Both kinds of figures mean the same for all, Quire included:

- decode: tokens a second of N streams from the moment when the last has its first token to the
  moment when the first has its last one, so that no prefill is counted;
- prefill: tokens of a prompt by the seconds to its first token, nothing cached.
"""

import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.peers.environment import DIRECTORY, Environment

Dtype = Literal["bfloat16", "int8", "int4"]
Kind = Literal["decode", "prefill"]


class PeerFailed(Exception):
    """A peer's program ended with an error or without a figure; carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start, and what its environment has beyond ours."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *words: object, **environment: str) -> "Command":
        """A mapping among the words has flags and their values; a flag of a tuple has so many
        values, and none if the tuple is empty."""
        return cls(tuple(_words(words)), environment)

    @property
    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def _words(words: Iterable[object]) -> Iterator[str]:
    for word in words:
        if not isinstance(word, Mapping):
            yield str(word)
            continue
        for flag, value in word.items():
            values = value if isinstance(value, tuple) else (value,)
            if values:
                yield from (flag, *map(str, values))


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The measurements of an engine's process: decode of each number of streams (`prompt` tokens
    in, `tokens` out), prefill of each length, each `repeats` times. The best time counts, since
    other processes may disturb the others."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    prompt: int = 128
    tokens: int = 128
    threads: int = 2
    repeats: int = 1

    @property
    def flags(self) -> dict[str, object]:
        """As the programs in `bench/peers/inside` read them."""
        return {f"--{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens a second; `size` is the number of streams or the length of the prompt."""

    kind: Kind
    size: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ServerOptions:
    port: int
    threads: int = 2
    max_num_seqs: int = 64
    max_model_len: int = 4096
    num_kv_tokens: int = 32_768


class Peer(ABC):
    """`model` is always what `prepare` returned for the same dtype."""

    name: str
    formats: Mapping[Dtype, str]
    """The peer's own name for its weights, by dtype, such as `Q8_0`."""
    environment: Environment | None = None
    """Where its packages are; None if it runs from this checkout."""

    @property
    def is_ready(self) -> bool:
        return self.environment is None or self.environment.is_ready

    def setup(self) -> None:
        """Install what is not installed. CalledProcessError: a step failed."""
        if self.environment:
            self.environment.create()

    def prepare(self, checkpoint: Path, dtype: Dtype) -> Path:
        """The checkpoint as this peer reads it, made once and kept."""
        return checkpoint

    @abstractmethod
    def measure(self, model: Path, dtype: Dtype, run: EngineRun) -> list[Figure]:
        """Run the engine alone, without a server. PeerFailed."""

    @abstractmethod
    def server(self, model: Path, dtype: Dtype, options: ServerOptions) -> Command:
        """An OpenAI-compatible server on 127.0.0.1, which takes token ids as a prompt."""


def output_of(command: Command, timeout_s: float = 3600) -> str:
    """Standard output of a program. PeerFailed: it ended with another status than 0."""
    done = subprocess.run(
        command.arguments,
        env=command.full_environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise PeerFailed(f"status {done.returncode}: {' '.join(command.arguments)}\n{tail}")
    return done.stdout


def json_lines(output: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects; an engine's logs may stand between them."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def figures(command: Command) -> list[Figure]:
    """Run a program of `bench/peers/inside`. PeerFailed: an error, or not one figure."""
    found = best_of(
        Figure(line["kind"], line["size"], line["tokens_per_s"])
        for line in json_lines(output_of(command))
        if "tokens_per_s" in line
    )
    if not found:
        raise PeerFailed(f"no figure: {' '.join(command.arguments)}")
    return found


def best_of(repeated: Iterable[Figure]) -> list[Figure]:
    """The fastest of each kind and size, in the order in which they came first."""
    best: dict[tuple[Kind, int], Figure] = {}
    for figure in repeated:
        key = (figure.kind, figure.size)
        best[key] = max(best.get(key, figure), figure, key=lambda each: each.tokens_per_s)
    return list(best.values())


def converted_directory(peer: str, checkpoint: Path, dtype: Dtype) -> Path:
    """Where a peer keeps a checkpoint in its own form. Named by the weights' size and time too: a
    checkpoint that was made anew is converted anew."""
    weights = sorted(checkpoint.glob("*.safetensors"))[0].stat()
    stamp = f"{weights.st_size:x}-{weights.st_mtime_ns:x}"
    return DIRECTORY / "models" / f"{checkpoint.name}-{peer}-{dtype}-{stamp}"
