"""The matrix of exactness: which strategies of choosing tokens run under which conditions."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from quire.messages import Request
from tests.exactness import Answer
from tests.late_device import LateForward

from . import exactness_mixed as mixed
from .exactness_conditions import (
    STRATEGIES,
    all_disturbances,
    blocks,
    blocks_from_files,
    chunks,
    crash,
    crash_in_its_prompt,
    crash_without_cache,
    drain,
    explained,
    in_a_batch,
    lateness,
    preemption,
    preemption_without_cache,
    prefix_of_another,
    prefix_of_its_own,
    retained,
    retained_by_a_dead_worker,
    role_change,
    swapping,
    threads,
    undisturbed,
    upgrade,
    upgrade_to_other_weights,
)
from .exactness_disturbances import DisturbedDeployment
from .exactness_setting import Setting

NUM_SWAP_BLOCKS = 400
ADAPTED = ("greedy", "temperature", "4 samples, adjusted", "structured", "4 beams")
"""The strategies that are compared with a LoRA adapter, and with KV in int8, too."""


@dataclass(frozen=True, slots=True)
class Condition:
    run: Callable[[DisturbedDeployment, Request], Awaitable[Answer]]
    setting: Setting = field(default=Setting())


CONDITIONS = {
    "alone": Condition(undisturbed),
    "batch of 64": Condition(in_a_batch, Setting(num_decoders=1)),
    "preempted": Condition(preemption),
    "preempted, nothing cached": Condition(preemption_without_cache),
    "swapped": Condition(swapping, Setting(num_swap_blocks=NUM_SWAP_BLOCKS)),
    "drained": Condition(drain),
    "decode worker dies": Condition(crash),
    "decode worker dies, nothing cached": Condition(crash_without_cache),
    "prefill worker dies": Condition(crash_in_its_prompt, Setting(chunk=5, num_prefills=2)),
    "all of it": Condition(
        all_disturbances,
        Setting(
            block_size=5, num_swap_blocks=NUM_SWAP_BLOCKS, chunk=7, num_threads=2, num_decoders=3
        ),
    ),
    "prefix of another": Condition(prefix_of_another),
    "prefix of its own": Condition(prefix_of_its_own),
    "explained": Condition(explained),
    "retained": Condition(retained),
    "retained, its worker dies": Condition(retained_by_a_dead_worker, Setting(num_prefills=2)),
    "blocks from files": Condition(blocks_from_files, Setting(keeps_files=True)),
    "a worker changes its role": Condition(role_change),
    "upgraded": Condition(upgrade, Setting(num_decoders=1)),
    "upgraded, other weights": Condition(upgrade_to_other_weights, Setting(num_decoders=1)),
    "chunks of 1": Condition(chunks, Setting(chunk=1)),
    "chunks of 5": Condition(chunks, Setting(chunk=5)),
    "chunks of 16": Condition(chunks, Setting(chunk=16)),
    "2 threads": Condition(threads, Setting(num_threads=2)),
    "blocks of 1": Condition(blocks, Setting(block_size=1)),
    "blocks of 5": Condition(blocks, Setting(block_size=5)),
    "blocks of 64": Condition(blocks, Setting(block_size=64)),
    "mixed, alone": Condition(undisturbed, Setting(num_decoders=1, mix=True)),
    "mixed, among others": Condition(
        mixed.among_others, Setting(chunk=32, num_decoders=1, mix=True)
    ),
    "mixed, preempted": Condition(mixed.preemption, Setting(mix=True)),
    "mixed, worker dies": Condition(mixed.crash, Setting(mix=True)),
    "mixed, all of it": Condition(mixed.all_disturbances, Setting(num_decoders=3, mix=True)),
    "late device": Condition(lateness, Setting(device=LateForward)),
    "late device, batch of 64": Condition(in_a_batch, Setting(num_decoders=1, device=LateForward)),
    "late device, drained": Condition(drain, Setting(device=LateForward)),
    "late device, decode worker dies": Condition(crash, Setting(device=LateForward)),
    "late device, mixed, among others": Condition(
        mixed.among_others, Setting(chunk=32, num_decoders=1, device=LateForward, mix=True)
    ),
    "late device, mixed, all of it": Condition(
        mixed.all_disturbances, Setting(num_decoders=3, device=LateForward, mix=True)
    ),
    "late device, all of it": Condition(
        all_disturbances,
        Setting(5, num_swap_blocks=NUM_SWAP_BLOCKS, num_decoders=3, device=LateForward),
    ),
}
for name in (
    *("batch of 64", "preempted, nothing cached", "swapped", "drained", "decode worker dies"),
    *("all of it", "late device, all of it", "mixed, preempted"),
):
    condition = CONDITIONS[name]
    CONDITIONS[f"speculation, {name}"] = replace(
        condition, setting=replace(condition.setting, speculates=True)
    )
for name in [name for name in CONDITIONS if name.startswith("speculation, ")]:
    condition = CONDITIONS[name]
    CONDITIONS[name.replace("speculation", "draft model")] = replace(
        condition, setting=replace(condition.setting, has_draft_model=True)
    )
for name in (
    *("alone", "batch of 64", "preempted", "preempted, nothing cached", "swapped", "drained"),
    *("decode worker dies", "decode worker dies, nothing cached", "prefill worker dies"),
    *("all of it", "prefix of its own", "chunks of 5", "late device, all of it"),
    *("speculation, all of it", "draft model, all of it"),
):
    condition = CONDITIONS[name]
    CONDITIONS[f"adapter, {name}"] = replace(
        condition, setting=replace(condition.setting, adapts=True)
    )
for name in ("alone", "all of it"):
    condition = CONDITIONS[name]
    CONDITIONS[f"int8 KV, {name}"] = replace(
        condition, setting=replace(condition.setting, kv_in_int8=True)
    )
WHOLE = (
    *("preempted, nothing cached", "all of it"),
    *("late device, all of it", "speculation, all of it", "mixed, among others"),
)
"""The conditions that `make test` runs with every strategy; `make test-full` runs the whole matrix.
A swap, a drain and the death of a decode worker are in "all of it"."""
OF_LOGITS = ("chunks of", "blocks of", "2 threads")
"""The beginnings of conditions that change no more than how logits are computed, whose bits
`test_models_bitwise.py` compares."""
SAMPLE = ("greedy", "logprobs of the prompt", "4 samples, adjusted", "structured", "4 beams")
"""The strategies that `make test` runs under the other conditions."""
SMALL_SAMPLE = ("4 samples, adjusted", "4 beams")
"""The strategies that `make test` runs with a LoRA adapter, KV in int8 or a draft model, and under
the conditions `OF_LOGITS`."""


def sample(name: str) -> Sequence[str]:
    setting = CONDITIONS[name].setting
    if setting.has_draft_model and setting.device is LateForward:
        return (*SMALL_SAMPLE, "greedy")
    is_special = setting.adapts or setting.kv_in_int8 or setting.has_draft_model
    if is_special or name.startswith(OF_LOGITS):
        return SMALL_SAMPLE
    return tuple(STRATEGIES) if name in WHOLE else SAMPLE


CELLS = [
    pytest.param(strategy, name, marks=() if strategy in sample(name) else pytest.mark.full)
    for name, condition in CONDITIONS.items()
    for strategy in (
        ADAPTED if condition.setting.adapts or condition.setting.kv_in_int8 else STRATEGIES
    )
]
