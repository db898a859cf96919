"""Requests with their undisturbed outputs."""

import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from quire.async_client import AsyncClient
from quire.messages import Request
from quire.types import Beam, Delta, FinishReason, Prompt, Sampling, TokenLogprobs
from tests.chaos.limits import UNDISTURBED_S

SHARED_PREFIX = "The following is a long story about a small town by the sea. " * 6
_TOPICS = ("the harbour", "a storm", "two sisters", "the lighthouse", "an old dog", "the winter")
_NUM_PER_KIND = 2
_LONG = 3000
"""In tokens: more than fits unread between a worker and a client that does not read."""


@dataclass(frozen=True, slots=True)
class Output:
    """The whole output of one sequence."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stopped_by: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    score: float | None

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Output":
        last = deltas[-1]
        return cls(
            tuple(token for delta in deltas for token in delta.token_ids),
            "".join(delta.text for delta in deltas),
            last.finish_reason,
            last.stopped_by,
            tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
            last.score,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A request with its undisturbed outputs: one for each sequence, by index."""

    kind: str
    prompt: Prompt
    sampling: Sampling
    outputs: tuple[Output, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_long(self) -> bool:
        return self.sampling.max_tokens == _LONG

    @property
    def is_delivered_whole(self) -> bool:
        """Whether the whole output comes at the end."""
        return self.sampling.beam is not None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(len(one.tokens) for one in self.outputs)


def cases_of(seed: int) -> list[Case]:
    """Cases of every kind, still without outputs. Some share a prompt prefix."""
    chance = random.Random(seed)
    made = []
    for number in range(_NUM_PER_KIND):
        for kind, sampling in _samplings(chance).items():
            topic = f"{chance.choice(_TOPICS)}, number {chance.randrange(1000)}: "
            alone = topic * chance.randrange(1, 8)
            made.append(Case(kind, alone if number else SHARED_PREFIX + topic, sampling))
    for kind, sampling in list(_samplings(chance).items())[:2]:
        made.append(Case(f"long {kind}", alone, replace(sampling, max_tokens=_LONG)))
    return made


def _samplings(chance: random.Random) -> dict[str, Sampling]:
    """Sampling parameters by kind; greedy and sampled come first."""
    greedy = Sampling(temperature=0.0, max_tokens=chance.randrange(20, 160), ignore_eos=True)
    sampled = replace(greedy, temperature=0.9, top_p=0.95, seed=chance.getrandbits(64))
    penalised = replace(
        sampled,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={chance.randrange(1000): 2.0, chance.randrange(1000): -100.0},
        bad_words=("sea", "the"),
        min_tokens=10,
        logprobs=2,
    )
    # Each sample reaches its stop string at another place, if at all; the others continue.
    stop = ("e" + chance.choice("drn"), "zz")
    search = Sampling(max_tokens=chance.randrange(20, 100), n=2, beam=Beam(4))
    early = Beam(3, length_penalty=chance.choice((0.0, 0.6, 2.0)), early_stopping="never")
    return {
        "greedy": greedy,
        "sampled": sampled,
        "stop": replace(sampled, stop=stop),
        "logprobs": replace(sampled, logprobs=3, prompt_logprobs=2),
        "penalties": penalised,
        "samples": replace(sampled, n=chance.randrange(3, 7)),
        "samples that stop": replace(sampled, n=4, stop=stop),
        "samples with penalties": replace(penalised, n=3, prompt_logprobs=1),
        "search": search,
        "search of one beam": replace(search, n=1, ignore_eos=True, beam=Beam(1)),
        "search to the end": replace(search, n=3, ignore_eos=True, beam=early),
    }


async def with_outputs(client: AsyncClient, cases: Sequence[Case]) -> list[Case]:
    """The cases with their outputs, each computed alone before the first fault."""
    return [await _with_outputs(client, case) for case in cases]


async def _with_outputs(client: AsyncClient, case: Case) -> Case:
    stream = client.send(Request(case.prompt, case.sampling), UNDISTURBED_S)
    async with aclosing(stream):
        deltas = [delta async for delta in stream]
    indices = range(1 + max(delta.index for delta in deltas))
    outputs = tuple(Output.of([d for d in deltas if d.index == index]) for index in indices)
    assert all(one.finish_reason for one in outputs), f"{case.kind} did not end: {outputs}"
    return replace(case, outputs=outputs, prompt_logprobs=deltas[0].prompt_logprobs)
