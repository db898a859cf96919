"""One sequence while an engine has it; touched by the engine's thread alone."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from blockstore.hashing import next_hash
from blockstore.store import PrefixHash
from services.common.pool.allotment import blocks_to_go_on
from services.common.ticket import FinishReason, Ticket
from services.engine.batch import Draw, Row, Scoring
from services.engine.history import History


class Stamps(Protocol):
    """What blocks say of themselves (law 6)."""

    def first_mismatch(
        self, block_ids: Seq[int], parent: PrefixHash, hashes: Seq[PrefixHash], token_ids: Seq[int]
    ) -> int | None: ...

    def are_written_by(self, block_ids: Seq[int], owner: str) -> bool: ...


CompletedBlock = tuple[int, PrefixHash, PrefixHash, tuple[int, ...]]
"""(block id, its prefix hash, its parent's, its token ids)."""


class Sequence:
    """Where a sequence stands:

    tokens        |------- prompt -------|---- generated ----|
    KV computed   |==================================|          num_computed
    KV adopted    |===========|                                 num_adopted: in shared blocks
    block table   |  b0 |  b1 |  b2 |  b3 |  b4 |  b5 |  b6 |
    blocks hashed |  b0 |  b1 |  b2 |  b3 |                     len(self.hashes)

    KV of adopted positions is never stored again, even where a query is computed anew (law 2).
    A sequence can be run while the slots of its uncomputed tokens are in its block table.
    `prompt_logprobs`: tell those of the prompt too, each with so many of the likeliest; then all of
    it has to be computed, adopted or not.
    """

    def __init__(
        self,
        ticket: Ticket,
        *,
        block_ids: Seq[int],
        block_size: int,
        num_computed: int,
        num_adopted: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        prompt_logprobs: int | None = None,
    ) -> None:
        state, sampling = ticket.sequences[0], ticket.sampling
        self.key = ticket.holder_id
        self.order = ticket.order
        self.tokens = [*ticket.prompt_token_ids, *state.token_ids]
        self.block_table = list(block_ids)
        self.num_computed = num_computed
        self.num_adopted = num_adopted
        self._block_size = block_size
        num_prompt = self._num_prompt_tokens = len(ticket.prompt_token_ids)
        self._draw = Draw(sampling, state.index)
        self._prompt_logprobs = prompt_logprobs
        self._stop_ids = frozenset(sampling.stop_token_ids)
        ends = self._stop_ids | eos_token_ids
        if not sampling.ignore_eos:
            self._stop_ids = ends
        self._history: History | None = None
        if History.matters(sampling):
            self._history = History(sampling, self.tokens, num_prompt, ends)
        self._max_len = min(num_prompt + sampling.max_tokens, max_model_len)
        self._root = ticket.root_hash
        self.hashes: list[PrefixHash] = []
        self._hash_until(max(num_computed, num_adopted))

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_runnable(self) -> int:
        """Uncomputed tokens that have a slot."""
        slots = len(self.block_table) * self._block_size
        return min(len(self.tokens), slots) - self.num_computed

    def is_stamped(self, stamps: Stamps) -> bool:
        """Whether its blocks say what they have to: its tokens, as far as they are full of computed
        ones, and after that nothing but who writes them."""
        num_full = len(self.hashes)
        full, rest = self.block_table[:num_full], self.block_table[num_full:]
        tokens = self.tokens[: num_full * self._block_size]
        wrong = stamps.first_mismatch(full, self._root, self.hashes, tokens)
        return wrong is None and stamps.are_written_by(rest, self.key)

    def row(self, num_tokens: int) -> Row:
        """The next `num_tokens` uncomputed tokens; they draw if they are the last."""
        end = self.num_computed + num_tokens
        return Row(
            token_ids=self.tokens[self.num_computed : end],
            start=self.num_computed,
            block_table=self.block_table,
            store_from=self.num_adopted,
            draw=self._next_draw() if end == len(self.tokens) else None,
            scoring=self._scoring(end),
        )

    def _next_draw(self) -> Draw:
        if self._history is None:
            return self._draw
        return replace(self._draw, adjustment=self._history.adjustment())

    def _scoring(self, end: int) -> Scoring | None:
        """Each token but the first is told by the state of the one before it."""
        if self._prompt_logprobs is None:
            return None
        stop = min(end + 1, self._num_prompt_tokens)
        token_ids = self.tokens[self.num_computed + 1 : stop]
        return Scoring(token_ids, self._prompt_logprobs) if token_ids else None

    def advance(self, num_tokens: int, token: int | None) -> FinishReason | None:
        """`num_tokens` were computed and, unless None, `token` was drawn; why the sequence ends."""
        self.num_computed += num_tokens
        if token is None:
            return None
        self.tokens.append(token)
        if token in self._stop_ids:
            return FinishReason.STOP
        if len(self.tokens) >= self._max_len:
            return FinishReason.LENGTH
        return None

    @property
    def full_blocks(self) -> tuple[tuple[int, PrefixHash], ...]:
        """Its finished blocks, adopted ones too, as they are or may be published."""
        return tuple(zip(self.block_table, self.hashes, strict=False))

    def take_completed(self) -> list[CompletedBlock]:
        """Blocks whose KV became complete since the last call; never an adopted one."""
        return self._hash_until(self.num_computed)

    def _hash_until(self, num_tokens: int) -> list[CompletedBlock]:
        size, completed = self._block_size, []
        for number in range(len(self.hashes), num_tokens // size):
            parent = self.hashes[-1] if self.hashes else self._root
            token_ids = tuple(self.tokens[number * size : (number + 1) * size])
            self.hashes.append(next_hash(parent, token_ids))
            completed.append((self.block_table[number], self.hashes[-1], parent, token_ids))
        return completed

    def wanted_blocks(self, look_ahead: int) -> int:
        """Blocks to have so that `look_ahead` more tokens find their slots (never more than the
        whole sequence needs); 0 when it has them."""
        total = blocks_to_go_on(len(self.tokens), look_ahead, self._max_len, self._block_size)
        return total if total > len(self.block_table) else 0
