"""Combines the simulation and the timings of one block size into its costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.advice import SizeCosts, prefix_costs
from advisor.memory import PagedMemory
from advisor.simulation import Outcome, simulate
from advisor.workload import RecordedRequest
from blockstore.memory_store import MemoryStore


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a simulation. `num_calls`: calls of the block store. `num_blocks`: sum of the
    lengths of all requests' block tables at their ends."""

    outcome: Outcome
    num_calls: int
    num_blocks: int


async def replay(
    asked: Sequence[RecordedRequest], num_slots: int, block_size: int, max_model_len: int
) -> Replay:
    """Simulate the requests on a pool of `num_slots` token slots. DoesNotFit: a request can never
    get its slots."""
    store = MemoryStore()
    memory = await PagedMemory.on(store, "advise", num_slots, block_size, max_model_len)
    outcome = await simulate(asked, memory)
    return Replay(outcome, memory.num_calls.total(), memory.num_blocks)


def size_costs(
    asked: Sequence[RecordedRequest],
    block_size: int,
    found: Replay,
    attention_us: float,
    store_us_per_token: float,
) -> SizeCosts:
    outcome = found.outcome
    tail, look_ahead = outcome.wasted
    lost_tokens, prefix_efficiency = prefix_costs(asked, block_size)
    return SizeCosts(
        block_size=block_size,
        utilization=outcome.utilization,
        tail=tail,
        look_ahead=look_ahead,
        num_at_once=outcome.mean_running,
        num_preemptions=outcome.num_preemptions,
        blocks_per_request=found.num_blocks / len(asked),
        store_calls_per_token=found.num_calls / num_generated(asked),
        store_us_per_token=store_us_per_token,
        lost_tokens=lost_tokens,
        prefix_efficiency=prefix_efficiency,
        attention_us=attention_us,
    )


def num_generated(asked: Sequence[RecordedRequest]) -> int:
    return sum(request.num_generated_tokens for request in asked)
