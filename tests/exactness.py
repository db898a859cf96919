"""The strategies of choosing tokens and the answers that the matrix of exactness compares
(`tests/integration/test_exactness.py`), and that upgrades must not change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenizers import pre_tokenizers

from quire import messages
from quire.types import Beam, Choice, Delta, Sampling, StructuredOutput, TokenLogprobs, Usage

SEED = 7
"""The seed of every request that is compared; the other requests of its batch have other seeds."""


def strategies(num_tokens: int, seed: int = SEED) -> dict[str, Sampling]:
    """Sampling parameters by the strategy's name. Answers have `num_tokens` tokens; adjusted ones
    end a little sooner. A new entry is compared under every condition."""
    drawn = Sampling(temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    adjusted = adjusted_sampling(drawn)
    words = StructuredOutput(regex=rf"([a-z]{{2,5}}[.,] ){{{num_tokens}}}")
    structured = replace(drawn, ignore_eos=False, structured_outputs=words)
    return {
        "greedy": replace(drawn, temperature=0.0),
        "temperature": drawn,
        "top_k and top_p": replace(drawn, top_k=40, top_p=0.8),
        "min_p": replace(drawn, temperature=1.5, min_p=0.1),
        "adjusted": adjusted,
        "adjusted, greedy": replace(adjusted, temperature=0.0),
        "logprobs": replace(drawn, logprobs=5),
        "logprobs of the prompt": replace(drawn, logprobs=0, prompt_logprobs=3),
        "4 samples": replace(drawn, n=4),
        "4 samples, adjusted": replace(adjusted, n=4, logprobs=2),
        "structured": structured,
        "structured, greedy": replace(structured, temperature=0.0),
        "4 samples, structured": replace(structured, n=4, repetition_penalty=1.2, logprobs=2),
        "4 beams": replace(drawn, temperature=0.0, n=4, beam=Beam(4)),
    }


def adjusted_sampling(drawn: Sampling) -> Sampling:
    """Only 15 letters are allowed, so that the penalties soon apply to all of them. The answer ends
    with the first `o` after `min_tokens`."""
    return replace(
        drawn,
        allowed_token_ids=letters("abcdefghijklmno"),
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={letters("o")[0]: 3.0, letters("b")[0]: -0.5},
        bad_words=("d", "bc", "ef", "ge", "hij"),
        stop_token_ids=letters("o"),
        min_tokens=drawn.max_tokens - 4 if drawn.max_tokens else 0,
    )


def letters(text: str) -> tuple[int, ...]:
    """The letters' tokens in the vocabulary of `bench.make_checkpoint`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return tuple(alphabet.index(letter) for letter in text)


def width(sampling: Sampling) -> int:
    """How many sequences run for a request."""
    return sampling.beam.width if sampling.beam else sampling.n


def is_streamed(sampling: Sampling) -> bool:
    """Whether the client gets tokens before the end."""
    return sampling.beam is None


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client receives; the usage is not compared. `scores`: those of a beam search."""

    choices: tuple[Choice, ...]
    scores: tuple[float | None, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    usage: Usage = field(compare=False)

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Answer":
        whole = messages.completion(deltas)
        scores = {delta.index: delta.score for delta in deltas if delta.finish_reason}
        return cls(
            whole.choices,
            tuple(scores[choice.index] for choice in whole.choices),
            whole.prompt_logprobs,
            whole.usage,
        )
