"""Cross-encoders: scores equal those of transformers, and such a model does nothing else."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from quire import LLM, InvalidRequest
from tests.e2e.conftest import POOL_MEMORY
from tests.e2e.deployment import serving

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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    directory = cross_encoder(tmp_path / "model", family)
    expected = torch.sigmoid(logits(directory)).tolist()
    with LLM(str(directory), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        for _ in range(2):  # computed, and from the prefix cache
            assert llm.score(QUERY, DOCUMENTS, use_tqdm=False) == pytest.approx(expected, abs=1e-4)
        with pytest.raises(InvalidRequest, match="only a cross-encoder scores pairs"):
            llm.embed(QUERY, use_tqdm=False)
    assert max(expected) - min(expected) > 0.01


def test_the_endpoints_score_pairs_and_refuse_the_rest(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    directory = cross_encoder(tmp_path / "model", "qwen3", sentence_transformers=identity)
    expected = logits(directory).tolist()
    memory = ("--pool-memory", str(POOL_MEMORY))
    with (
        serving(directory, tmp_path, *memory) as running,
        httpx.Client(base_url=f"{running.http}/v1", timeout=60) as http,
    ):
        found = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
        scores = [each["score"] for each in found["data"]]
        assert scores == pytest.approx(expected, abs=1e-4)
        ranked = http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
        order = sorted(range(3), key=lambda index: -expected[index])
        assert [each["index"] for each in ranked["results"]] == order
        cut = {"text_1": QUERY, "text_2": DOCUMENTS[2], "truncate_prompt_tokens": 30}
        assert http.post("/score", json=cut).json()["usage"]["prompt_tokens"] == 30
        for path, body in (
            ("embeddings", {"input": QUERY}),
            ("completions", {"prompt": QUERY}),
            ("chat/completions", {"messages": [{"role": "user", "content": QUERY}]}),
        ):
            answer = http.post(f"/{path}", json={"model": "", **body})
            assert answer.status_code == 400
            assert "use /v1/score or /v1/rerank" in answer.json()["error"]["message"]
