"""The parts and settings of a deployment of the exactness tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockstore.memory_store import MemoryStore
from blockstore.records import Allocation, PrefixHash
from tests.late_device import Device, computes_at_launch

MODEL = "toy"
ADAPTER = "toy with an adapter"


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts and settings of one deployment.

    `chunk`: how many tokens a prefill worker computes in one step. `speculates`: the decode workers
    verify drafts, and every second draft is wrong. `has_draft_model`: the drafts come from a draft
    model, which is the model itself, and not from the answer that is known. `adapts`: requests name
    a LoRA adapter. `kv_in_int8`: the pools hold keys and values in int8. `keeps_files`: blocks that
    prompts ask for again are kept in files. `mix`: the decode workers prefill, too, and there are
    no prefill workers.
    """

    block_size: int = 8
    num_blocks: int = 1200
    num_swap_blocks: int = 0
    chunk: int = 64
    num_threads: int = 1
    num_prefills: int = 1
    num_decoders: int = 2
    device: Device = computes_at_launch
    speculates: bool = False
    has_draft_model: bool = False
    adapts: bool = False
    kv_in_int8: bool = False
    keeps_files: bool = False
    mix: bool = False

    @property
    def model(self) -> str:
        return ADAPTER if self.adapts else MODEL


class Store(MemoryStore):
    """A store whose prefix cache can be switched off: with `finds_nothing`, no lookup succeeds."""

    finds_nothing = False

    async def allocate(
        self,
        pool_id: str,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        if self.finds_nothing and pool_id == "pool":
            hashes, branches = (), ()
        arguments = pool_id, holder_id, worker_id, order, hashes, num_blocks, branches
        return await super().allocate(*arguments)
