"""The engine's report about a sequence group: its tokens, finished blocks and end."""

from dataclasses import dataclass, field

from blockstore.records import PrefixHash
from services.engine.batch import Fault
from services.protocol.logprobs import LogprobColumns
from services.protocol.messages import Generated
from services.protocol.ticket import GroupState


@dataclass(slots=True)
class Advance:
    """The progress of one group in the retired step, or in two steps retired together. The group
    fills it, and the engine sends it to the event loop."""

    key: str
    outputs: list[Generated] = field(default_factory=list)
    """The tokens of each sequence and step, as the gateway gets them, or in the last step of a beam
    search its best hypotheses."""
    completed: list[tuple[int, PrefixHash]] = field(default_factory=list)
    """(block id, prefix hash) of blocks to commit."""
    freed: list[int] = field(default_factory=list)
    """Blocks to give back to the pool, once those are committed."""
    num_uncomputed: int = 0
    wanted_blocks: int = 0
    """How many blocks the holder should have acquired in total by now; 0 if it has enough."""
    remaining: GroupState | None = None
    """None while the group runs on. Otherwise the engine has dropped the group: no step touches its
    blocks any more, and its sequences of this state, if any, continue elsewhere."""
    fault: Fault | None = None
    """The fault of a row for which the engine has dropped the group; the rest of the step counts.
    None if no row failed."""
    broken: tuple[tuple[int, PrefixHash], ...] = ()
    """(Block id, prefix hash) of all full blocks of a failed group, adopted ones too. Their KV may
    be the cause, so they must leave the prefix index."""
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    """The logprobs of the prompt's next tokens, chunk by chunk, if the request asks for them."""
    embedding: tuple[float, ...] = ()
    """The embedding of the prompt, once it is computed, if the request asks for it."""
