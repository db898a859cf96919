"""How much each format of Quire and OpenVINO costs on a published model: the table of
`docs/benchmarks/quantization.md`.

    python -m bench.peers setup openvino
    python -m bench.quality [FILE.gguf] [--texts 8] [--dtypes bfloat16 int8 int4]

Both engines get one checkpoint, the weights of the file in bf16, and quantize it themselves. Each
format is compared with fp32 on texts of 512 tokens, which come with Python's documentation. Prints
the perplexity, the share of positions with the likeliest token of fp32, and the mean change of a
token's log-probability.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import get_args

import torch

from bench.harness import first, markdown, options
from bench.peers import OPENVINO
from bench.peers.openvino import OpenVino
from bench.peers.peer import Dtype, json_lines, output_of
from quire import LLM, Sampling
from quire.supervisor.model_source import find_model
from tests.real_models import transformers_model, transformers_tokenizer

TEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Said:
    """A model's judgement of all positions of the texts but each first one."""

    likeliest: list[int]
    logprobs: list[float]
    """The log-probability of the token that stands there."""

    def beside(self, exact: "Said") -> tuple[str, str, str]:
        """The perplexity, the share of equal likeliest tokens, and the change of a logprob."""
        number = len(self.logprobs)
        same = sum(map(int.__eq__, self.likeliest, exact.likeliest)) / number
        pairs = zip(self.logprobs, exact.logprobs, strict=True)
        change = sum(abs(mine - other) for mine, other in pairs) / number
        return f"{math.exp(-sum(self.logprobs) / number):.3f}", f"{same:.3f}", f"{change:.3f}"


def by_quire(checkpoint: Path, texts: list[list[int]], dtype: str, quantize: str) -> Said:
    with LLM(str(checkpoint), dtype=dtype, quantize=quantize, pool_memory="128MiB") as llm:
        once = Sampling(max_tokens=1, prompt_logprobs=1)
        answers = llm.generate(texts, once, use_tqdm=False)
    positions = [position for answer in answers for position in answer.prompt_logprobs]
    likeliest = [position.top[0].token_id for position in positions]
    return Said(likeliest, [position.chosen.logprob for position in positions])


def by_openvino(peer: OpenVino, checkpoint: Path, dtype: Dtype, texts: Path) -> Said:
    lines = json_lines(output_of(peer.quality(peer.prepare(checkpoint, dtype), dtype, texts)))
    return Said(
        [token for line in lines for token in line["likeliest"]],
        [logprob for line in lines for logprob in line["logprobs"]],
    )


def rows(
    checkpoint: Path, texts: list[list[int]], file: Path, dtypes: Sequence[Dtype]
) -> Iterator[tuple[str, ...]]:
    exact = by_quire(checkpoint, texts, "float32", "none")
    yield "fp32", *exact.beside(exact)
    for dtype in dtypes:
        quantize = "none" if dtype == "bfloat16" else dtype
        yield f"quire {dtype}", *by_quire(checkpoint, texts, "bfloat16", quantize).beside(exact)
        for peer in OPENVINO[:1] if dtype == "bfloat16" else OPENVINO:
            said = by_openvino(peer, checkpoint, dtype, file)
            yield f"{peer.name} {peer.formats[dtype]}", *said.beside(exact)


@dataclass(frozen=True)
class Options:
    file: str = first("demo")
    texts: int = 8
    dtypes: tuple[Dtype, ...] = get_args(Dtype)


def main() -> None:
    asked = options(Options, __doc__)
    model = Path(find_model(asked.file).directory)
    tokenizer = transformers_tokenizer(model)
    pieces = [tokenizer(text)["input_ids"][:TEXT_TOKENS] for text in topics.values()]
    whole = [piece for piece in pieces if len(piece) == TEXT_TOKENS]
    texts = whole[:: len(whole) // asked.texts][: asked.texts]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / model.stem
        transformers_model(model, torch.bfloat16).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        file = Path(directory) / "texts.json"
        file.write_text(json.dumps(texts))
        header = ("format", "perplexity", "likeliest token", "change of a logprob")
        print(markdown(header, list(rows(checkpoint, texts, file, asked.dtypes))))


if __name__ == "__main__":
    main()
