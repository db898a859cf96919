"""Workers of several ranks on gloo: the tokens of transformers, the same bits in any batch, copies
of blocks, and the end of a rank."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import kvops
from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.engine.batch import Row, RowOutput, Scoring
from services.pool.locks import is_held
from services.runtime.errors import StartupError
from services.worker.ranks.processes import Ranks
from tests.waiting import wait_until

from .family_checkpoints import CASES
from .family_checkpoints import make as make_family
from .gguf_checkpoints import write_gguf, write_twin
from .models_oracle import GREEDY, SPECS, Oracle, RecordingRunner, random_prompt
from .quantized_checkpoints import fp8_block, gptq, write_quantized
from .ranks import RankedRunner

SAMPLE = [
    ("qwen3-gqa-tied", 2),
    ("llama-gqa", 2),
    ("qwen3-mha-bias", 2),
    ("llama3-rope-mqa", 2),
    ("mistral-window", 2),
    ("qwen3-mha-bias", 4),
    ("qwen3-gqa-tied", 4),
]
"""Untied and tied heads, vocabularies that 2 and 4 do not divide, biases, one KV head, copies of
two."""

FULL = [
    (name, size)
    for name, spec in SPECS.items()
    for size in (2, 4)
    if spec.num_heads % size == 0 and (name, size) not in SAMPLE
]


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Ranks]]:
    """Ranks that load one model after another."""
    found: dict[int, Ranks] = {size: Ranks(size) for size in (2, 4)}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.mark.parametrize(
    ("name", "size"), [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.full) for one in FULL)]
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, size: int, crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """Prompts in chunks beside decoding rows, on an arena of NaN, with a shared prefix."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS[name])
    oracle, ranks = Oracle(checkpoint), crews[size]
    runner = RankedRunner(checkpoint, tmp_path, ranks)
    first = runner.place(random_prompt(40, 1))
    runner.decode_all([first], chunk=16)
    adopting = runner.place((*first.prompt[:24], *random_prompt(9, 2)), shared=first)
    trials = [adopting, *(runner.place(random_prompt(length, 3)) for length in (3, 17, 30))]
    runner.decode_all(trials, chunk=7, late=1)
    for trial in [first, *trials]:
        wanted = oracle.answer(trial.prompt)
        assert trial.new_tokens == wanted.token_ids
        torch.testing.assert_close(torch.stack(trial.logits), wanted.logits, atol=1e-4, rtol=1e-4)
    ranks.leave()


@pytest.mark.parametrize(
    "name",
    [
        *("phi3, partial longrope", "glm4", "gemma2, small caps"),
        *("mixtral", "qwen3 moe, some layers", "gpt-oss"),
    ],
)
def test_families_are_divided(name: str, crews: dict[int, Ranks], tmp_path: Path) -> None:
    """Fused linears are taken apart before they are divided; norms of outputs follow the sums."""
    case = CASES[name]
    directory = make_family(tmp_path / "model", case)
    oracle, runner = Oracle(directory), RankedRunner(directory, tmp_path, crews[2])
    trials = [runner.place(random_prompt(length, seed=length)) for length in case.lengths]
    runner.decode_all(trials, chunk=13, late=1)
    for trial in trials:
        assert trial.new_tokens == oracle.answer(trial.prompt).token_ids


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_logits_have_the_same_bits_in_any_batch(
    size: int, kv_dtype: str, crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """Law 10 for a given number of ranks: alone, in chunks, and beside others."""
    spec = CheckpointSpec(num_heads=8, num_kv_heads=4, hidden_size=128, vocab_size=401)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    runner = RankedRunner(
        checkpoint,
        tmp_path,
        crews[size],
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
    )
    prompt = random_prompt(45, 1)
    alone, in_chunks, beside = (runner.place(prompt) for _ in range(3))
    runner.decode_all([alone], chunk=100)
    runner.decode_all([in_chunks], chunk=7)
    others = [runner.place(random_prompt(length, 5)) for length in (1, 13, 33, 60)]
    runner.decode_all([*others[:2], beside, *others[2:]], chunk=20, late=1)
    for trial in (in_chunks, beside):
        assert trial.new_tokens == alone.new_tokens
        assert all(map(torch.equal, trial.logits, alone.logits))
    crews[size].leave()


@pytest.mark.parametrize("stored", ["fp8 in blocks", "GGUF of 8 bits"])
def test_quantized_weights_in_floating_point_are_divided(
    stored: str, crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """They are converted whole, then divided: a part may begin in the middle of a scale's block."""
    spec = CheckpointSpec(hidden_size=128, head_dim=32, intermediate_size=320, tied=False)
    plain = make_checkpoint(tmp_path / "plain", spec)
    model = tmp_path / "model"
    if stored == "fp8 in blocks":
        twin = write_quantized(plain, model, fp8_block())
    else:
        model = tmp_path / "model.gguf"
        kinds = write_gguf(plain, model, lambda name: "Q8_0" if "blk." in name else "F32")
        twin = write_twin(plain, tmp_path / "twin", kinds)
    runner = RankedRunner(model, tmp_path, crews[2])
    trial = runner.place(random_prompt(30, 1))
    runner.decode_all([trial], 100)
    wanted = Oracle(twin).answer(trial.prompt)
    assert trial.new_tokens == wanted.token_ids
    torch.testing.assert_close(torch.stack(trial.logits), wanted.logits, atol=1e-3, rtol=1e-3)
    crews[2].leave()


@pytest.mark.parametrize("scheme", ["gptq", "fp8 in blocks", "GGUF of 4 bits"])
def test_quantized_weights_stay_packed_beside_kernels_that_take_them(
    scheme: str, crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """As on GPUs: with the logits of one process. Each rank has whole groups of the inputs, and the
    head is in floating point."""
    spec = CheckpointSpec(hidden_size=128, head_dim=64, intermediate_size=256, tied=False)
    plain = make_checkpoint(tmp_path / "plain", spec)
    model = tmp_path / "model"
    if scheme == "GGUF of 4 bits":
        model, kind = tmp_path / "model.gguf", "int4-32"
        write_gguf(plain, model, lambda name: "Q4_0")
    else:
        kind = "int4-32" if scheme == "gptq" else "fp8-128"
        write_quantized(plain, model, gptq(32, symmetric=True) if scheme == "gptq" else fp8_block())
    runner = RankedRunner(model, tmp_path, crews[2], ops=kvops.backend("reference"))
    layer: Any = runner.model.layers[0]
    assert [one.weight.kind for one in (layer.qkv, layer.output, layer.down)] == [kind] * 3
    alone = RecordingRunner(model, 16, 20, "reference")
    trials = [one.place(random_prompt(30, 1)) for one in (runner, alone)]
    for one, trial in zip((runner, alone), trials, strict=True):
        one.decode_all([trial], 100)
    assert trials[0].new_tokens == trials[1].new_tokens
    found, wanted = (torch.stack(trial.logits) for trial in trials)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    crews[2].leave()


def test_copied_and_swapped_blocks_are_copied_at_all_ranks(
    crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """A sequence continues in copies of its blocks: within the pool, and through the swap pool."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["llama-gqa"])
    runner = RankedRunner(checkpoint, tmp_path, crews[2])
    own, colder = runner.membership.pool, runner.colder.pool

    def out(pairs: object) -> None:
        colder.copy_from(own, runner.ops, pairs)  # type: ignore[arg-type]

    def back(pairs: object) -> None:
        own.copy_from(colder, runner.ops, pairs)  # type: ignore[arg-type]

    wanted = Oracle(checkpoint).answer(random_prompt(30, 1)).token_ids
    for way in ("fork", "swap"):
        trial = runner.place(random_prompt(30, 1))
        runner.step([trial], 100)
        new = [runner.free.pop() for _ in trial.block_table]
        pairs = list(zip(trial.block_table, new, strict=True))
        if way == "fork":
            runner.steps.copy_blocks(pairs)
        else:
            crews[2].swapping(out, out=True)([(block, block) for block in trial.block_table])
            crews[2].swapping(back, out=False)(pairs)
        for rank in range(2):
            with runner.membership.directory.arena(rank).open("r+b") as arena:
                for block in trial.block_table:  # what was there is gone
                    arena.seek(block * runner.layout.block_bytes)
                    arena.write(b"\xff" * runner.layout.block_bytes)
        trial.block_table[:] = new
        runner.decode_all([trial], 100)
        assert trial.new_tokens == wanted
    crews[2].leave()


def test_logprobs_of_a_prompt_come_in_parts(crews: dict[int, Ranks], tmp_path: Path) -> None:
    """There are more states than are computed at once: the ranks compute the same parts."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["llama-gqa"])
    runner = RankedRunner(checkpoint, tmp_path, crews[2])
    prompt = random_prompt(150, 1)
    trial = runner.place(prompt)
    scoring = Scoring(prompt[1:], num_top=2)
    row = Row(prompt, 0, trial.block_table, draws=(GREEDY,), scoring=scoring)
    (found,) = runner.run([row])
    assert isinstance(found, RowOutput)
    assert found.prompt is not None
    assert len(found.prompt) == len(prompt) - 1
    assert found.tokens == tuple(Oracle(checkpoint).answer(prompt).token_ids[:1])
    crews[2].leave()


def test_a_rank_that_cannot_load_says_why(crews: dict[int, Ranks], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(num_heads=6, num_kv_heads=3))
    with pytest.raises(StartupError, match="tensor_parallel_size 4: 6 query heads"):
        RankedRunner(checkpoint, tmp_path, crews[4])


# Life and death


def test_the_lock_is_held_until_the_last_rank_has_ended(tmp_path: Path) -> None:
    """Law 5: rank 0 has dropped it, and another rank may still write."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["llama-gqa"])
    ranks = Ranks(2, on_end=lambda rank, status: None)
    runner = RankedRunner(checkpoint, tmp_path, ranks)
    path = runner.membership.lock.path
    runner.membership.lock.close()
    assert is_held(path)
    (pid,) = ranks.pids
    os.kill(pid, signal.SIGSTOP)
    assert is_held(path)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_held(path))
    ranks.close()


def test_a_worker_that_leaves_its_pool_keeps_its_ranks(
    crews: dict[int, Ranks], tmp_path: Path
) -> None:
    """A fenced worker joins again under another id, with the loaded model."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["llama-gqa"])
    runner = RankedRunner(checkpoint, tmp_path, crews[2])
    path = runner.membership.lock.path
    runner.membership.lock.close()
    crews[2].leave()
    assert not is_held(path)


def test_the_end_of_a_rank_is_noticed_with_its_status() -> None:
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
    ranks = Ranks(4, on_end=lambda rank, status: ended.put((rank, status)))
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert ended.get(timeout=30) == (2, -signal.SIGKILL)
    ranks.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
