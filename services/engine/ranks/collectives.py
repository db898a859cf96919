"""The values that the ranks of a worker exchange within a step.

Results have the same bits on all ranks. They have the same bits for any batch where a sum collects
all ranks' terms and adds them in the order of the ranks, in fp32: on CPUs, and on GPUs with the
setting `deterministic` (law 10). Otherwise GPUs sum by an all-reduce, which moves less and adds in
an order that depends on the message's size and the value's place in it. One kernel sums small
messages where the GPUs reach each other's memory (`one_shot.py`).

On a GPU an exchange is launched on the stream of the kernels around it (`asyncOp` is off), and so
becomes part of a CUDA graph that is captured there.

See ADR 127.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from services.engine.ranks.one_shot import OneShot, between_gpus
from services.model.checkpoint.shards import Shard

LOOPBACK = "127.0.0.1"


class Collectives:
    """The exchanges of one rank. All ranks have to call the same methods in the same order, with
    tensors of the same shapes; a rank of a group of one exchanges nothing.

    Raises RuntimeError if another rank has ended, or has not answered in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        vocabularies: Sequence[slice],
        one_shot: OneShot | None = None,
        *,
        in_order: bool,
    ) -> None:
        """`vocabularies` has the tokens of each rank. `in_order` says whether sums add up in the
        order of the ranks; if they need not, `one_shot` sums small messages."""
        self.tell: Callable[..., None] | None = None
        """At rank 0: lets the other ranks execute a method of `Rank`."""
        self._group = group
        self._vocabularies = vocabularies
        self._in_order, self._one_shot = in_order, one_shot
        self.rank = group.rank()
        self._size = group.size()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in their dtype; it may be in the memory of `x`."""
        if not self._in_order:
            if self._one_shot is not None and self._one_shot.takes(x):
                return self._one_shot.sum(x)
            reducing = dist.AllreduceOptions()
            reducing.asyncOp = False
            total = x.contiguous()
            self._group.allreduce([total], reducing).wait()
            return total
        parts = x.new_empty(self._size, *x.shape)
        options = AllgatherOptions()
        options.asyncOp = False
        self._group._allgather_base(_octets(parts), _octets(x), options).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """The embeddings of tokens. `table` has the rows of this rank's tokens."""
        own = self._vocabularies[self.rank]
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        rows = table[(token_ids - own.start).clamp(0, len(table) - 1)]
        return self.sum(rows.where(is_own[:, None], torch.zeros_like(rows[:1])))

    def begin_logits(self, states: Tensor) -> None:
        """At rank 0: let the other ranks compute the logits of these final states, too."""
        if self.tell is not None:
            self.tell("logits", len(states))
            if len(states):
                self.broadcast(_octets(states))

    def join_logits(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, [N, vocab_size], at rank 0; other ranks get their own back.
        `logits` are of this rank's tokens."""
        widths = [own.stop - own.start for own in self._vocabularies]
        padded = logits.new_zeros(len(logits), max(widths))
        padded[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(padded) for _ in range(self._size)] if self.rank == 0 else []
        self._group.gather(
            [[_octets(part) for part in parts]] if parts else [], [_octets(padded)], _from_rank_0()
        ).wait()
        if not parts:
            return logits
        whole = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
        return torch.cat(whole, dim=1)

    def broadcast(self, octets: Tensor) -> None:
        """Overwrite the bytes of all ranks, uint8, with the bytes of rank 0."""
        options = dist.BroadcastOptions()
        options.asyncOp = False
        self._group.broadcast([octets], options).wait()

    def abort(self) -> None:
        """End the connection without the other ranks. No exchange may be in flight."""
        self._group.abort()


def connect(
    meeting: Path, shard: Shard, device: torch.device, timeout_s: float, *, in_order: bool = True
) -> Collectives:
    """Connect this rank with the others: NCCL on GPUs, gloo on CPUs. All ranks call it with the
    same `meeting`, a new file in a private directory, which may be removed when all have returned.
    Raises RuntimeError if a rank has not come in `timeout_s`."""
    timeout, one_shot = timedelta(seconds=timeout_s), None
    store = dist.FileStore(str(meeting), shard.size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
        if not in_order and shard.size > 1:
            one_shot = between_gpus(store, shard.rank, shard.size, device)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Not the interface of the hostname, which a container may not be able to resolve.
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        group = gloo(store, shard.rank, shard.size, options)
    vocabularies = [Shard(shard.config, rank, shard.size).vocabulary for rank in range(shard.size)]
    found = Collectives(group, vocabularies, one_shot, in_order=in_order)
    found.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))  # NCCL connects only now
    return found


def _octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in one dimension: gloo does not know every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _from_rank_0() -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank, options.asyncOp = 0, False
    return options
