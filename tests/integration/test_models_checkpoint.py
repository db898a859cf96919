"""The random checkpoints of other tests and of benchmarks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from bench import make_checkpoint as module
from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.model.checkpoint.reading import read_model_config
from services.model.config.rope_config import Llama3Scaling, RopeConfig

from .models_oracle import LLAMA3_ROPE, Oracle, random_prompt


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_checkpoints_of_the_same_arguments_have_the_same_bytes(tmp_path: Path) -> None:
    first = contents(make_checkpoint(tmp_path / "a", shards=2))
    assert contents(make_checkpoint(tmp_path / "b", CheckpointSpec(shards=2))) == first
    other = contents(make_checkpoint(tmp_path / "c", shards=2, seed=1))
    assert {name for name in first if first[name] != other[name]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_the_config_reads_back(tmp_path: Path) -> None:
    spec = CheckpointSpec("llama", vocab_size=401, tied=False, rope_scaling=LLAMA3_ROPE)
    config = read_model_config(make_checkpoint(tmp_path, spec, attention_bias=True))
    assert (config.vocab_size, config.tied_embeddings, config.o_bias) == (401, False, True)
    assert set(config.ropes) == {RopeConfig(10_000.0, Llama3Scaling(8.0, 1.0, 4.0, 256))}
    assert config.eos_token_ids == (258, 256)


@pytest.mark.parametrize("vocab_size", [259, 260, 384, 1009, 20_000])
def test_the_tokenizer_fills_the_vocabulary_and_round_trips(
    tmp_path: Path, vocab_size: int
) -> None:
    checkpoint = make_checkpoint(tmp_path, vocab_size=vocab_size, hidden_size=8)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Pages of the tree, naïve 漢字 🙂\n\t'quoted'"
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == vocab_size
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [257, 64, 258]
    if vocab_size > 384:
        assert len(ids) < len(text.encode())


def test_the_chat_template_renders(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint(tmp_path) / "tokenizer_config.json").read_text())
    rendered = jinja2.Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_greedy_decoding_wanders(tmp_path: Path, family: str, tied: bool) -> None:
    """The first 6 tokens of ten prompts contain at least 20 different ones."""
    oracle = Oracle(make_checkpoint(tmp_path, family=family, tied=tied))
    answers = [oracle.answer(random_prompt(8, seed)).token_ids for seed in range(10)]
    assert len({token for tokens in answers for token in tokens}) >= 20


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"family": "mamba"}, "'mamba' is none of qwen3, qwen2, llama, mistral"),
        ({"vocab_size": 258}, "vocab_size 258 is below 259"),
        ({"num_kv_heads": 3}, "3 kv heads do not divide 4 heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"shards": 4}, "shards 4"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_checkpoint(tmp_path, replace(CheckpointSpec(), **changes))
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_every_field(tmp_path: Path) -> None:
    options = "--family llama --no-tied --vocab-size 300 --dtype bfloat16 --shards 2 --seed 5"
    rope = ["--rope-scaling", json.dumps(LLAMA3_ROPE)]
    command = [sys.executable, module.__file__, str(tmp_path / "cli"), *options.split(), *rope]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spec = CheckpointSpec(
        family="llama",
        tied=False,
        vocab_size=300,
        dtype="bfloat16",
        shards=2,
        seed=5,
        rope_scaling=LLAMA3_ROPE,
    )
    assert contents(tmp_path / "cli") == contents(make_checkpoint(tmp_path / "api", spec))
