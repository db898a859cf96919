"""LoRA adapters in the decoders: the tokens of PEFT, the same bits in any batch, and refusals."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops.native import emulated_kernels, usable_kernels
from services.engine.batch import LoadedAdapter, Row
from services.engine.ranks.shared_steps import DividedAdapters
from services.model.checkpoint.adapter import CONFIG_FILE, AdapterFiles
from services.model.checkpoint.reading import read_model_config
from services.model.config.quantization import Quantization
from services.runtime.errors import InvalidRequest, StartupError
from services.worker.ranks.processes import Ranks
from tests.adapters import ATTENTION, MLP, AdapterOracle, make_adapter

from .family_checkpoints import CASES, make
from .models_oracle import NUM_NEW_TOKENS, SPECS, RecordingRunner, Trial, random_prompt
from .quantized_checkpoints import dequantized
from .ranks import RankedRunner
from .test_models_quantization import error

ADAPTERS: dict[str, dict[str, Any]] = {
    "all linears": {},
    "attention, odd rank": {"r": 5, "lora_alpha": 3, "target_modules": ATTENTION},
    "mlp, rslora": {"r": 4, "use_rslora": True, "target_modules": MLP},
    "one linear of three": {"r": 20, "target_modules": ["v_proj"]},
    "one layer": {"layers_to_transform": [1]},
    "ranks and alphas by name": {
        "target_modules": "all-linear",
        "rank_pattern": {"layers.0.self_attn.[qv]_proj": 3, "q_proj": 12, "down_proj": 20},
        "alpha_pattern": {"v_proj": 7, r"layers\.1\.mlp\..*": 5},
    },
}


class AdapterRunner(RecordingRunner):
    """Runs trials with the adapters of `adapters`; rows are grouped by adapter, as the scheduler
    does."""

    adapters: dict[int, LoadedAdapter | None]

    def load(self, directory: Path) -> LoadedAdapter:
        files = AdapterFiles.read(directory, self.model.whole_config, 64)
        return LoadedAdapter(files.digest, self.model.load_adapter(files))

    def with_adapter(self, prompt: tuple[int, ...], adapter: LoadedAdapter | None) -> Trial:
        trial = self.place(prompt)
        self.adapters = {**getattr(self, "adapters", {}), id(trial): adapter}
        return trial

    def step(self, suspects: list[Trial], chunk: int) -> None:
        def digest(trial: Trial) -> str:
            adapter = self.adapters[id(trial)]
            return adapter.digest if adapter else ""

        self._suspects = sorted(suspects, key=digest)
        super().step(self._suspects, chunk)

    def run(self, rows: Any) -> Any:
        return super().run(
            [
                Row(**{**fields_of(row), "adapter": self.adapters[id(trial)]})
                for trial, row in zip(self._suspects, rows, strict=True)
            ]
        )


def fields_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("qwen3-gqa-tied", kind) for kind in ADAPTERS),
        *((model, "all linears") for model in ("qwen2-mha", "llama3-rope-mqa", "mistral-window")),
        ("qwen2-mqa-tied", "ranks and alphas by name"),  # no head is a multiple of 16 outputs
    ],
)
def test_greedy_tokens_are_those_of_peft(
    model: str, kind: str, backend: str, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[model])
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 3, **ADAPTERS[kind])
    runner = AdapterRunner(checkpoint, 4, 200, backend)
    loaded = runner.load(adapter)
    oracle, alone = AdapterOracle(checkpoint, adapter), AdapterOracle(checkpoint, None)
    prompts = [random_prompt(length, 2) for length in (3, 50, 17)]
    trials = [runner.with_adapter(prompt, loaded) for prompt in prompts]
    runner.decode_all(trials, chunk=9, late=1)
    differing = 0
    for trial, prompt in zip(trials, prompts, strict=True):
        tokens, logits = oracle.greedy(prompt, NUM_NEW_TOKENS)
        assert trial.new_tokens == tokens
        torch.testing.assert_close(torch.stack(trial.logits), logits, rtol=1e-3, atol=1e-3)
        differing += tokens != alone.greedy(prompt, NUM_NEW_TOKENS)[0]
    assert differing, "the adapter changes something"


@pytest.mark.parametrize("isa", [*usable_kernels()[1:], *emulated_kernels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_computes_adapters(
    dtype: torch.dtype, isa: str, tmp_path: Path
) -> None:
    """The logits of PEFT, and a row's bits are the same alone and beside rows of another adapter.
    Heads of 10 and ranks of 5 are no whole vectors."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["qwen2-mqa-tied"])
    directories = [
        make_adapter(tmp_path / "first", checkpoint, 3, r=5),
        make_adapter(tmp_path / "second", checkpoint, 4, target_modules=["v_proj", "up_proj"]),
    ]
    runner = AdapterRunner(checkpoint, 4, 200, dtype=dtype, isa=isa)
    loaded = [runner.load(directory) for directory in directories]
    prompt = random_prompt(30, 2)
    together = [runner.with_adapter(prompt, one) for one in [*loaded, None, *loaded]]
    runner.decode_all(together, chunk=9)
    for one, trial, directory in zip(loaded, together, directories, strict=False):
        alone = runner.with_adapter(prompt, one)
        runner.decode_all([alone], chunk=100)
        assert all(map(torch.equal, alone.logits, trial.logits))
        wanted = AdapterOracle(checkpoint, directory).greedy(prompt, 1)[1][0]
        assert error([trial.logits[0]], [wanted]) < (1e-3 if dtype == torch.float32 else 0.05)


class RankedAdapterRunner(AdapterRunner, RankedRunner):
    """As `AdapterRunner`, on several ranks."""

    def load(self, directory: Path) -> LoadedAdapter:
        files = AdapterFiles.read(directory, self.model.whole_config, 64)
        return LoadedAdapter(files.digest, self.ranks.adapters.load(files))


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Ranks]]:
    """Ranks that load one model after another."""
    found = {size: Ranks(size) for size in (2, 4)}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.mark.parametrize(
    ("model", "kind", "size"),
    [
        *(("qwen3-gqa-tied", kind, 2) for kind in ADAPTERS),
        ("qwen3-mha-bias", "all linears", 4),
        ("llama3-rope-mqa", "all linears", 4),  # copies of a KV head
    ],
)
def test_ranks_divide_an_adapter(
    model: str, kind: str, size: int, crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """The tokens of PEFT and of one rank, in a batch with another adapter and with none. Adapters
    that are gone at rank 0 are forgotten at the others, and their numbers are not used again."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[model])
    adapters = [
        make_adapter(tmp_path / "first", checkpoint, 3, **ADAPTERS[kind]),
        make_adapter(tmp_path / "second", checkpoint, 4),
        None,
    ]
    runner = RankedAdapterRunner(checkpoint, tmp_path, crews[size])
    oracles = [AdapterOracle(checkpoint, adapter) for adapter in adapters]
    prompt = random_prompt(30, 2)
    for _ in range(2):
        loaded = [None if adapter is None else runner.load(adapter) for adapter in adapters]
        trials = [runner.with_adapter(prompt, one) for one in loaded]
        runner.decode_all(trials, chunk=9, late=1)
        for trial, oracle in zip(trials, oracles, strict=True):
            tokens, logits = oracle.greedy(prompt, NUM_NEW_TOKENS)
            assert trial.new_tokens == tokens
            torch.testing.assert_close(torch.stack(trial.logits), logits, rtol=1e-3, atol=1e-3)
        runner.adapters.clear()
    assert len({tuple(trial.new_tokens) for trial in trials}) > 1, "the adapters change something"
    crews[size].leave()


def test_ranks_forget_adapters_that_are_gone(tmp_path: Path) -> None:
    """Rank 0 tells their numbers with the next adapter; again, and that one's too, if a rank could
    not load it."""
    asked: list[tuple[int, tuple[int, ...]]] = []

    class Others:
        def ask(self, method: str, number: int, files: object, gone: tuple[int, ...]) -> None:
            asked.append((number, gone))
            if len(asked) == 3:
                raise StartupError("rank 1: adapter_model.safetensors: gone")

    shard: Any = SimpleNamespace(load_adapter=lambda files: files)
    others: Any = Others()
    adapters, files = DividedAdapters(shard, others), AdapterFiles(tmp_path, {}, "")
    kept = [adapters.load(files), adapters.load(files)]
    assert [one.number for one in kept] == [0, 1]
    del kept[0]
    with pytest.raises(ValueError, match="rank 1: adapter_model"):
        adapters.load(files)
    gc.collect()
    kept.append(adapters.load(files))
    kept.append(adapters.load(files))
    assert asked == [(0, ()), (1, ()), (2, (0,)), (3, (0, 2)), (4, ())]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("model", ["qwen3", "olmo2"])
def test_adapters_of_a_quantized_model_are_not_rounded(
    quantize: Quantization, model: str, tmp_path: Path
) -> None:
    """Beside the model's weights, only the inputs of its own linears are rounded. OLMo 2 has no
    norms there."""
    spec = CheckpointSpec(hidden_size=256, intermediate_size=512, head_dim=32)
    checkpoint = (
        make_checkpoint(tmp_path / "model", spec)
        if model == "qwen3"
        else make(tmp_path / "model", CASES["olmo2"])
    )
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 3)
    exact = AdapterRunner(dequantized(checkpoint, tmp_path / "same", quantize), 4, 300)
    rounded = AdapterRunner(checkpoint, 4, 300, dtype=torch.bfloat16, quantize=quantize)

    def first_logits(runner: AdapterRunner, adapter: LoadedAdapter | None) -> list[Tensor]:
        prompts = [random_prompt(length, 2) for length in range(1, 40, 3)]
        trials = [runner.with_adapter(prompt, adapter) for prompt in prompts]
        runner.decode_all(trials, chunk=100)
        return [trial.logits[0] for trial in trials]

    wanted = first_logits(exact, exact.load(adapter))
    of_rounding = error(first_logits(rounded, rounded.load(adapter)), wanted)
    of_no_adapter = error(first_logits(rounded, None), wanted)
    assert 0.001 < of_rounding < 0.02
    assert of_no_adapter > 0.5


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "int4"),
    ],
)
def test_a_row_has_the_same_bits_beside_rows_of_other_adapters(
    dtype: torch.dtype, quantize: Quantization | None, tmp_path: Path
) -> None:
    """Law 10, for rows with an adapter and for rows without one: alone, in chunks, together."""
    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(num_layers=3))
    runner = AdapterRunner(checkpoint, 4, 600, dtype=dtype, quantize=quantize, num_threads=2)
    kinds: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"r": 5, "target_modules": ["q_proj", "down_proj"]},
    }
    adapters: list[LoadedAdapter | None] = [
        None,
        *(
            runner.load(make_adapter(tmp_path / name, checkpoint, 5 + i, **fields))
            for i, (name, fields) in enumerate(kinds.items())
        ),
    ]
    prompt = random_prompt(33, 1)
    alone = [runner.with_adapter(prompt, adapter) for adapter in adapters]
    for trial in alone:
        runner.decode_all([trial], chunk=100)
    together = [
        runner.with_adapter(tokens, adapter)
        for tokens in (prompt, random_prompt(12, 4), random_prompt(1, 9))
        for adapter in adapters
    ]
    runner.decode_all(together, chunk=7, late=1)
    for one, other in zip(alone, together, strict=False):
        assert one.new_tokens == other.new_tokens
        assert all(map(torch.equal, one.logits, other.logits))
    assert len({tuple(trial.new_tokens) for trial in alone}) > 1


def config_with(adapter: Path, **fields: Any) -> None:
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, r"0.self_attn.q_proj has rank 8; r is 2, lora_alpha 16"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern \{'\(': 2\}: missing \)"),
        ({"rank_pattern": {"([a-z_.]+)+!": 2}}, "could take for ever to match"),
        ({"rank_pattern": {".*.*.*.*!": 2}}, "could take for ever to match"),
        ({"alpha_pattern": {f"a{i}": 1 for i in range(999)}}, "has 999 keys, at most 256"),
        ({"rank_pattern": [2]}, r"rank_pattern \[2\]: "),
        ({"alpha_pattern": {"v_proj": "x"}}, "v_proj has rank 8; r is 8, lora_alpha 'x'"),
        ({"lora_alpha": float("nan")}, "r is 8, lora_alpha nan"),
        ({"kasa_config": {"beta": 1}}, r"kasa_config \{'beta': 1\} is not supported"),
        ({"use_something_new": True}, "use_something_new True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base model's weights"),
        ({"init_lora_weights": "lora_ga"}, "'lora_ga' changes the base model's weights"),
        ({"r": 16}, "_proj has rank 8; r is 16"),
        ({"r": 0}, "r is 0, lora_alpha 16"),
        ({"r": "8"}, "r is '8'"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 1)
    config_with(adapter, **fields)
    with pytest.raises(InvalidRequest, match=problem):
        AdapterFiles.read(adapter, read_model_config(checkpoint), 64)


def test_adapters_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = read_model_config(checkpoint)
    other = make_checkpoint(tmp_path / "other", hidden_size=32)
    wrong = make_adapter(tmp_path / "wrong", other, 1)
    with pytest.raises(
        InvalidRequest, match=r"down_proj is \[64, 128\], lora_A \[8, 128\], lora_B \[32, 8\]"
    ):
        AdapterFiles.read(wrong, config, 64)
    deeper = make_adapter(tmp_path / "deep", make_checkpoint(tmp_path / "d", num_layers=5), 1)
    with pytest.raises(InvalidRequest, match=r"layers\.\d.* is not for one of this model's q_proj"):
        AdapterFiles.read(deeper, config, 64)
    untied = make_checkpoint(tmp_path / "untied", tied=False)
    head = make_adapter(tmp_path / "head", untied, 1, target_modules=["lm_head"])
    with pytest.raises(InvalidRequest, match=r"lm_head\.\S+ is not for one of"):
        AdapterFiles.read(head, read_model_config(untied), 64)
    with pytest.raises(InvalidRequest, match="rank 8 is above max_lora_rank 4"):
        AdapterFiles.read(make_adapter(tmp_path / "good", checkpoint, 1), config, 4)
    (tmp_path / "good" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        AdapterFiles.read(tmp_path / "good", config, 64)
    for text, problem in {
        "{": "Expecting",
        "[]": "is not a JSON",
        "[" * 10**5: "nested too deeply",
    }.items():
        (tmp_path / "good" / CONFIG_FILE).write_text(text)
        with pytest.raises(InvalidRequest, match=rf"good: {CONFIG_FILE}.*{problem}"):
            AdapterFiles.read(tmp_path / "good", config, 64)
    with pytest.raises(InvalidRequest, match="No such file"):
        AdapterFiles.read(tmp_path / "nowhere", config, 64)
