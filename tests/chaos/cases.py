"""Requests, and all that each of them says undisturbed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.client import AsyncClient
from quire.types import Prompt, Sampling, TokenLogprobs

LIMIT_S = 60.0

_SHARED = "The following is a long story about a small town by the sea. " * 6
_TOPICS = ("the harbour", "a storm", "two sisters", "the lighthouse", "an old dog", "the winter")
_LONG = 3000
"""Tokens: more than lie unread between a worker and a client that does not read."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and all that it says undisturbed."""

    name: str
    prompt: Prompt
    sampling: Sampling
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_long(self) -> bool:
        return self.sampling.max_tokens == _LONG


def cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    made = []
    for number, topic in enumerate(_TOPICS * 3):
        greedy = Sampling(temperature=0.0, max_tokens=chance.randrange(20, 160), ignore_eos=True)
        sampled = replace(greedy, temperature=0.9, top_p=0.95, seed=chance.getrandbits(64))
        alone = f"{topic}, number {chance.randrange(1000)}: " * chance.randrange(1, 8)
        kinds = {
            "greedy": (alone, greedy),
            "sampled": (alone, sampled),
            "shared": (_SHARED + topic, greedy),
            "stop": (alone, replace(sampled, stop=("e" + chance.choice("drn"), "zz"))),
            "logprobs": (_SHARED + alone, replace(sampled, logprobs=3, prompt_logprobs=2)),
        }
        name = list(kinds)[number % len(kinds)]
        made.append(Case(name, *kinds[name]))
        if number < 2:
            long = replace((greedy, sampled)[number], max_tokens=_LONG)
            made.append(Case(f"long {name}", alone, long))
    return made


async def undisturbed(client: AsyncClient, asked: Sequence[Case]) -> list[Case]:
    """Each computed alone, before anything happens."""
    known = []
    for case in asked:
        answer = await client.complete(case.prompt, case.sampling, timeout_s=LIMIT_S)
        told = replace(case, tokens=answer.token_ids, text=answer.text, logprobs=answer.logprobs)
        known.append(replace(told, prompt_logprobs=answer.prompt_logprobs))
    return known
