"""Requests of a trace in Mooncake's format: JSON lines of timestamp (ms), input_length,
output_length and hash_ids, one id for each 512 tokens of the prompt; equal ids are equal prefixes.

The traces are public: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

import json
from dataclasses import dataclass
from pathlib import Path

HASHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    arrived_s: float
    num_prompt_tokens: int
    num_generated_tokens: int
    hashes: tuple[int, ...]


def read(path: Path, speed: float) -> list[Request]:
    """`speed`: how many times faster than recorded the requests arrive."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Request(
            row["timestamp"] / 1000 / speed,
            row["input_length"],
            max(1, row["output_length"]),
            tuple(row["hash_ids"]),
        )
        for row in sorted(rows, key=lambda row: row["timestamp"])
    ]
