"""Cross-encoders: scores equal those of transformers, and such a model does nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from quire import LLM, InvalidRequest
from tests.e2e.conftest import POOL_MEMORY

QUERY = "What is a block?"
DOCUMENTS = ["A block is sixteen tokens.", "Trains are late.", "Blocks " * 30]


def cross_encoder(directory: Path, family: Any, **fields: Any) -> Path:
    """A random checkpoint with a classification head, whose tokenizer ends a text with token 257
    and joins a pair with token 256."""
    make_checkpoint(directory, CheckpointSpec(family=family))
    config = json.loads((directory / "config.json").read_text())
    (name,) = config["architectures"]
    config["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification")]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    model.save_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = [("<|endoftext|>", 256), ("<|im_start|>", 257)]
    tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_start|>", pair="$A <|endoftext|> $B <|im_start|>", special_tokens=ends
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def logits(directory: Path) -> torch.Tensor:
    torch.set_num_threads(1)
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    pairs = [tokenizer.encode(QUERY, document).ids for document in DOCUMENTS]
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([pair])).logits[0] for pair in pairs])


AS_THEY_ARE = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {}), ("qwen3", AS_THEY_ARE)],
)
def test_scores_are_those_of_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    directory = cross_encoder(tmp_path / "model", family, **fields)
    expected = (logits(directory) if fields else torch.sigmoid(logits(directory))).tolist()
    with LLM(str(directory), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        for _ in range(2):  # computed, and from the prefix cache
            assert llm.score(QUERY, DOCUMENTS, use_tqdm=False) == pytest.approx(expected, abs=1e-4)
        with pytest.raises(InvalidRequest, match="only a cross-encoder scores pairs"):
            llm.embed(QUERY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="use /v1/score or /v1/rerank"):
            llm.generate(QUERY, use_tqdm=False)
    assert max(expected) - min(expected) > 0.01
