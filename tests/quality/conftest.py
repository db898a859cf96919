"""Published models, as Quire and as transformers read their files, and real texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from services.engine.batch import Row, Scoring
from services.model.text.chat_template import ChatTemplate
from services.model.text.tokenizer import Tokenizer
from tests.integration.models_oracle import GREEDY, RecordingRunner
from tests.real_models import gemma3_file, transformers_model

BLOCK_SIZE = 16
TEXT_TOKENS, NUM_TEXTS = 512, 24
SAMPLE_TOKENS = 256
"""How much of a text `make test` takes."""
_TEXT_CHARACTERS = 4000  # more than 512 tokens of any model
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RealModel:
    """A model in a GGUF file. Both sides compute with its dequantized weights."""

    file: Path

    def prompt(self, question: str) -> list[int]:
        """A chat with one question, rendered with the template of the file."""
        tokenizer = Tokenizer.from_directory(self.file)
        template = ChatTemplate.from_directory(self.file, tokenizer.special_tokens)
        assert template is not None
        rendered = template.render([{"role": "user", "content": question}])
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    @cached_property
    def transformers(self) -> Any:
        return transformers_model(self.file, torch.float32).eval()

    @cached_property
    def texts(self) -> list[list[int]]:
        """Real prose, 512 tokens each, which edits of the docs do not change: of the license, and
        of the language reference that comes with Python."""
        parts = [(ROOT / "LICENSE").read_text(), *topics.values()]
        pieces = [
            part[begin : begin + _TEXT_CHARACTERS]
            for part in parts
            for begin in range(0, len(part) - _TEXT_CHARACTERS, _TEXT_CHARACTERS)
        ]
        step = len(pieces) // NUM_TEXTS
        tokenizer = Tokenizer.from_directory(self.file)
        return [list(tokenizer.encode(text)[:TEXT_TOKENS]) for text in pieces[::step][:NUM_TEXTS]]

    @cached_property
    def _expected(self) -> dict[tuple[int, ...], torch.Tensor]:
        return {}

    def expected(self, text: Sequence[int]) -> torch.Tensor:
        """The likeliest token after each token of a text, as transformers says in fp32."""
        key = tuple(text)
        if key not in self._expected:
            with torch.inference_mode():
                logits = self.transformers(torch.tensor([key])).logits[0]
            self._expected[key] = logits.argmax(-1)
        return self._expected[key]

    @cached_property
    def exact(self) -> RecordingRunner:
        """A runner with the weights of the file in fp32; loading one takes as long as two texts."""
        return self.runner(torch.float32, dequantize=True)

    def runner(self, dtype: torch.dtype, **options: Any) -> RecordingRunner:
        num_blocks = TEXT_TOKENS // BLOCK_SIZE
        return RecordingRunner(
            self.file, BLOCK_SIZE, num_blocks, dtype=dtype, num_threads=2, **options
        )


def all_logits(runner: RecordingRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits after each token, of one pass."""
    blocks = range(-(-len(token_ids) // BLOCK_SIZE))
    all_but_last = Scoring([0] * (len(token_ids) - 1), 0)
    row = Row(list(token_ids), 0, list(blocks), draws=(GREEDY,), scoring=all_but_last)
    return runner.logits([row])


@pytest.fixture(scope="session")
def models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealModel]:
    gemma3 = gemma3_file(tmp_path_factory.mktemp("gemma3"))
    return {"smollm2": RealModel(smollm2), "gemma3": RealModel(gemma3)}
