"""A sequence: its tokens, block table and computed positions. Only the engine thread touches it."""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from blockstore.hashing import next_hash
from blockstore.records import PrefixHash
from services.engine.batch import Draw, LoadedAdapter, Owner, Row, Scoring
from services.engine.forward import Drafts, PendingDrafts, known
from services.engine.sampling.adjustment import Adjustment
from services.engine.sequences.beam import num_candidates
from services.engine.sequences.grammar_state import GrammarState
from services.engine.sequences.penalty_state import PenaltyState
from services.engine.sequences.pooling import Pooler, ScoreHead
from services.model.structured.grammar import Grammar
from services.pool.allotment import blocks_for_decode
from services.pool.stamps import Stamps
from services.protocol.block_keys import common_prefix
from services.protocol.messages import Pooling
from services.protocol.ticket import FinishReason, SamplingParams, Ticket, TicketSequence

CompletedBlock = tuple[int, PrefixHash, PrefixHash, tuple[int, ...]]
"""(block id, prefix hash, parent's prefix hash, token ids)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that all sequences of a request share: for draws, their end, and block hashes. A
    sequence ends with a token of `stop_ids`, or at `max_len` tokens, prompt included."""

    sampling: SamplingParams
    stop_ids: frozenset[int]
    end_ids: frozenset[int]
    """`stop_ids` and the model's EOS tokens, even if the request ignores EOS. `min_tokens` bans
    these."""
    num_prompt_tokens: int
    max_len: int
    root: PrefixHash
    """The hash before a prompt's first block."""
    block_size: int
    prompt_logprobs: int | None = None
    """The number of likeliest tokens to report with each token of the prompt; None reports no
    prompt logprobs. With it, all tokens of the prompt are computed, even in adopted blocks."""
    grammar: Grammar | None = None
    """The grammar of the text; None allows any text."""
    adapter: LoadedAdapter | None = None
    pooling: Pooling | None = None
    """The pooling of the prompt's embedding; a request with it draws nothing."""
    score_head: ScoreHead | None = None

    @classmethod
    def of(
        cls,
        ticket: Ticket,
        block_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        adapter: LoadedAdapter | None = None,
        pooling: Pooling | None = None,
        score_head: ScoreHead | None = None,
    ) -> "Rules":
        sampling, num_prompt_tokens = ticket.sampling, len(ticket.prompt_token_ids)
        stop_ids = frozenset(sampling.stop_token_ids)
        end_ids = stop_ids | eos_token_ids
        stop_ids = stop_ids if sampling.ignore_eos else end_ids
        if sampling.beam is not None:
            sampling = replace(sampling, logprobs=num_candidates(sampling.beam, stop_ids))
        return cls(
            sampling=sampling,
            stop_ids=stop_ids,
            end_ids=end_ids,
            num_prompt_tokens=num_prompt_tokens,
            max_len=min(num_prompt_tokens + sampling.max_tokens, max_model_len),
            root=ticket.root_hash,
            block_size=block_size,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            adapter=adapter,
            pooling=pooling,
            score_head=score_head,
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """The continuation that sequence `index` of the group takes where shared tokens end: its `own`
    tokens, still to be computed, or a draw if it has none."""

    index: int
    own: tuple[int, ...] = ()


def split_common_prefix(branches: Seq[Branch]) -> tuple[tuple[int, ...], tuple[Branch, ...]]:
    """The longest common prefix of the branches' own tokens, and the branches without it."""
    shared = common_prefix([branch.own for branch in branches])
    return shared, tuple(Branch(branch.index, branch.own[len(shared) :]) for branch in branches)


class Sequence:
    """One sequence in the engine: its tokens, its block table, and how far its KV is computed.

    tokens        |------- prompt -------|---- generated ----|-- branches
    KV launched   |=====================================|       num_launched: of steps in flight too
    KV computed   |==================================|          num_computed: of retired steps
    KV adopted    |===========|                                 num_adopted: in shared blocks
    block table   |  b0 |  b1 |  b2 |  b3 |  b4 |  b5 |  b6 |
    blocks hashed |  b0 |  b1 |  b2 |  b3 |                     len(self.hashes)

    KV of adopted positions is never stored again, even if those positions are computed again
    (law 2). A sequence can run as far as the slots of its uncomputed tokens are in its block table.

    A step may compute *drafts* behind the last token. Those that are not accepted leave KV in slots
    from num_computed on, which the next step overwrites.

    A sequence *runs ahead* if a row takes the token that the step in flight draws. Only beams may
    not: the host chooses which of them go on. A draw with penalties or a grammar depends on that
    token; it is made beside the row's forward pass, once the host knows the token. Behind drafts in
    flight, num_launched counts all of them, and retirement takes back those that are rejected.

    Sequences of a group that begin with the same tokens are one `Sequence` until these tokens are
    computed; it has a branch for each of them. Most sequences have one branch: their next draw.
    """

    def __init__(
        self,
        rules: Rules,
        branches: Seq[Branch],
        tokens: Seq[int],
        *,
        block_ids: Seq[int],
        num_computed: int,
        num_adopted: int = 0,
        hashes: Seq[PrefixHash] = (),
    ) -> None:
        """`hashes` are the prefix hashes of leading blocks, as far as the caller knows them."""
        self.owner = Owner()
        self.branches = tuple(branches)
        self.tokens = list(tokens)
        self.block_table = list(block_ids)
        self.num_computed = self.num_launched = num_computed
        self.num_adopted = num_adopted
        self.rules = rules
        self._penalty_state: PenaltyState | None = None
        if PenaltyState.is_needed(rules.sampling):
            self._penalty_state = PenaltyState(
                rules.sampling, self.tokens, rules.num_prompt_tokens, rules.end_ids
            )
        self._grammar_state: GrammarState | None = None
        if rules.grammar is not None:
            self._grammar_state = GrammarState(rules.grammar, self.tokens, rules.num_prompt_tokens)
        self.pooler = None if rules.pooling is None else Pooler(rules.pooling, rules.score_head)
        self.may_run_ahead = self.pooler is None and rules.sampling.beam is None
        num_full = max(num_computed, num_adopted) // rules.block_size
        self.hashes = list(hashes[:num_full])
        self._hash_until(num_full * rules.block_size)

    @property
    def index(self) -> int:
        """The index in the group of its first branch."""
        return self.branches[0].index

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_unlaunched(self) -> int:
        return max(0, len(self.tokens) - self.num_launched)

    @property
    def in_flight(self) -> bool:
        """Whether a step that is not retired computes tokens of it."""
        return self.num_launched > self.num_computed

    @property
    def num_unknown(self) -> int:
        """The most tokens that the step in flight may draw for it: one, and one for each draft."""
        return max(0, self.num_launched + 1 - len(self.tokens))

    @property
    def _num_inputs(self) -> int:
        """The number of its tokens, including as many as are being drawn if the sequence runs ahead
        and will not end with them."""
        num_tokens = len(self.tokens)
        if self.num_launched < num_tokens or not self.may_run_ahead:
            return num_tokens
        has_one_draw = len(self.branches) == 1 and not self.branches[0].own
        goes_on = has_one_draw and self.num_launched + 1 < self.rules.max_len
        return self.num_launched + 1 if goes_on else num_tokens

    @property
    def has_state(self) -> bool:
        """Whether its draws depend on its tokens by penalties or a grammar."""
        return self._penalty_state is not None or self._grammar_state is not None

    @property
    def num_runnable(self) -> int:
        """The tokens that have a slot and are not launched."""
        slots = len(self.block_table) * self.rules.block_size
        return min(self._num_inputs, slots) - self.num_launched

    @property
    def num_draftable(self) -> int:
        """How many drafts may follow its last token, or the last token that a step in flight may
        draw for it: for all of them there are slots, and a token more. At most 0 for beams, which
        need one draw's logprobs a step."""
        if self.rules.sampling.beam is not None or self.num_launched < len(self.tokens) - 1:
            return 0
        if len(self.branches) > 1 or self.branches[0].own:
            return 0
        slots = len(self.block_table) * self.rules.block_size
        return min(slots, self.rules.max_len - 1) - self.num_launched - 1

    @property
    def next_block(self) -> int | None:
        """The block that it writes next; None if its block table does not reach that far."""
        number = self._next_number
        return self.block_table[number] if number < len(self.block_table) else None

    def replace_next_block(self, block_id: int) -> None:
        self.block_table[self._next_number] = block_id

    @property
    def _next_number(self) -> int:
        return max(self.num_launched, self.num_adopted) // self.rules.block_size

    def is_stamped(self, stamps: Stamps, owner: str, beside: "Sequence | None" = None) -> bool:
        """Whether the stamps of its blocks are right: stamps of finished blocks name exactly its
        tokens, and the other stamps name `owner` as the holder that writes them. Leading finished
        blocks shared with `beside` are not checked again."""
        first = 0
        if beside is not None:
            first = len(common_prefix([self.full_blocks, beside.full_blocks]))
        num_full, size = len(self.hashes), self.rules.block_size
        full, rest = self.block_table[first:num_full], self.block_table[num_full:]
        tokens = self.tokens[first * size : num_full * size]
        parent = self.hashes[first - 1] if first else self.rules.root
        wrong = stamps.first_mismatch(full, parent, self.hashes[first:], tokens)
        return wrong is None and stamps.are_written_by(rest, owner)

    def launch(self, num_tokens: int, drafts: Drafts = ()) -> Row:
        """The row of the next `num_tokens` tokens and `drafts`. It draws if they are the last ones.
        From now on the tokens are in flight."""
        end = self.num_launched + num_tokens
        runs_ahead = end > len(self.tokens)
        start = min(self.num_launched, len(self.tokens))
        num_unknown = self.num_launched - start
        self.num_launched = end + len(drafts)
        is_last, pooler = end >= len(self.tokens), self.pooler
        draws_behind = runs_ahead and self.has_state
        given, num_pending = ((), len(drafts)) if isinstance(drafts, PendingDrafts) else (drafts, 0)
        draws: tuple[Draw, ...] = ()
        if draws_behind:
            draws = (Draw(self.rules.sampling, self.index),)
        elif is_last and pooler is None:
            draws = self._draws(drafts)
        return Row(
            token_ids=[*self.tokens[start:end], *given],
            start=start,
            block_table=self.block_table,
            store_from=self.num_adopted,
            draws=draws,
            scoring=self._scoring(start, end),
            num_states=0 if pooler is None else pooler.num_states(num_tokens, is_last=is_last),
            num_drafts=len(drafts),
            owner=self.owner,
            num_on_device=runs_ahead + num_pending,
            num_unknown=num_unknown,
            draw_behind=self.draw_behind if draws_behind else None,
            adapter=self.rules.adapter,
        )

    def draw_behind(self, drafts: tuple[int, ...]) -> Draw:
        """The draw of the token after its last one and `drafts`; it has one branch, which draws."""
        return self._draws(drafts)[-1]

    def _draws(self, drafts: Drafts) -> tuple[Draw, ...]:
        """The draws of all branches after the last token; or the one branch's draw after the last
        token and after each draft. Draws that depend on drafts wait for them."""
        penalties, grammar = self._penalty_state, self._grammar_state
        told = known(drafts) if self.has_state else ()
        adjustments: Seq[Adjustment | None] = [None] * (len(drafts) + 1)
        if penalties is not None:
            adjustments = penalties.adjustments(told) if told else [penalties.adjustment()]
        return tuple(
            Draw(
                self.rules.sampling,
                branch.index,
                adjustment,
                grammar.behind(told[:number]) if grammar and number else grammar,
            )
            for number, adjustment in enumerate(adjustments)
            for branch in self.branches
            if not branch.own
        )

    def _scoring(self, start: int, end: int) -> Scoring | None:
        """The prompt tokens to score in a row of start .. end: each state scores the next."""
        num_top = self.rules.prompt_logprobs
        if num_top is None:
            return None
        stop = min(end + 1, self.rules.num_prompt_tokens)
        token_ids = self.tokens[start + 1 : stop]
        return Scoring(token_ids, num_top) if token_ids else None

    def fork(self, branches: Seq[Branch], own: Seq[int] = ()) -> "Sequence":
        """A new sequence with the same tokens and computed blocks, then `own` tokens."""
        num_blocks = -(-self.num_computed // self.rules.block_size)
        fork = Sequence(
            self.rules,
            branches,
            (*self.tokens, *own),
            block_ids=self.block_table[:num_blocks],
            num_computed=self.num_computed,
            num_adopted=self.num_adopted,
            hashes=self.hashes,
        )
        fork.may_run_ahead = self.may_run_ahead
        return fork

    def split(self) -> list["Sequence"]:
        """Split into one sequence per continuation, once all tokens are computed.

        Branches with the same next token stay together, up to the end of what they have in common;
        a branch that draws is on its own. This sequence is the first of the result.
        """
        if len(self.branches) == 1 and not self.branches[0].own:
            return [self]
        by_next_token = defaultdict[object, list[Branch]](list)
        for branch in self.branches:
            by_next_token[branch.own[0] if branch.own else branch].append(branch)
        (shared, branches), *others = map(split_common_prefix, by_next_token.values())
        forks = [self.fork(fork_branches, own) for own, fork_branches in others]
        self.tokens += shared
        self.branches = branches
        return [self, *forks]

    def drop_branch(self, index: int) -> None:
        self.branches = tuple(branch for branch in self.branches if branch.index != index)

    def continue_as_beam(self, index: int, token: int) -> None:
        """Make this sequence beam `index` of the group, and append the token."""
        self.branches = (Branch(index),)
        self.tokens.append(token)

    def append(self, token: int) -> FinishReason | None:
        """Append a drawn token. Returns the finish reason if the sequence ends with it."""
        self.tokens.append(token)
        if token in self.rules.stop_ids:
            return FinishReason.STOP
        if len(self.tokens) >= self.rules.max_len:
            return FinishReason.LENGTH
        return None

    @property
    def full_blocks(self) -> tuple[tuple[int, PrefixHash], ...]:
        """(block id, prefix hash) of its finished blocks, adopted ones too."""
        return tuple(zip(self.block_table, self.hashes, strict=False))

    def take_completed(self) -> list[CompletedBlock]:
        """Blocks whose KV became complete since the last call; never adopted ones."""
        return self._hash_until(self.num_computed)

    def _hash_until(self, num_tokens: int) -> list[CompletedBlock]:
        size, completed = self.rules.block_size, []
        for number in range(len(self.hashes), num_tokens // size):
            parent = self.hashes[-1] if self.hashes else self.rules.root
            token_ids = tuple(self.tokens[number * size : (number + 1) * size])
            self.hashes.append(next_hash(parent, token_ids))
            completed.append((self.block_table[number], self.hashes[-1], parent, token_ids))
        return completed

    def num_missing(self, look_ahead: int) -> int:
        """How many blocks it lacks for its tokens and `look_ahead` more, at most for `max_len`."""
        return max(0, self._num_blocks(0, look_ahead) - len(self.block_table))

    def num_missing_with_branches(self, look_ahead: int) -> int:
        """Like `num_missing`, but counts the blocks of all branches, which share the full ones."""
        num_full = len(self.tokens) // self.rules.block_size
        own = (self._num_blocks(len(b.own), look_ahead) - num_full for b in self.branches)
        return max(0, num_full + sum(own) - len(self.block_table))

    def _num_blocks(self, num_own: int, look_ahead: int) -> int:
        num_tokens = self._num_inputs + num_own
        return blocks_for_decode(num_tokens, look_ahead, self.rules.max_len, self.rules.block_size)

    def ticket_sequences(self) -> list[TicketSequence]:
        """The sequence as a ticket has it, one `TicketSequence` for each branch."""
        generated = tuple(self.tokens[self.rules.num_prompt_tokens :])
        block_ids = tuple(self.block_table)
        return [
            TicketSequence(branch.index, generated + branch.own, block_ids, self.num_computed)
            for branch in self.branches
        ]
