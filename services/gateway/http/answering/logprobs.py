"""Logprobs in the JSON formats of OpenAI's two endpoints."""

from collections.abc import Sequence
from typing import Any

from quire.types import Candidate
from services.gateway.output.delta import PositionLogprobs, PromptReport

JSON = dict[str, Any]

_MIN_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot express; the same value as in vLLM."""


def text_logprobs(tokens: Sequence[PositionLogprobs], begin: int = 0) -> JSON:
    """The field `logprobs` of a text completion.

    `begin` is the offset of the tokens' text in the choice's text. `top_logprobs` includes the
    chosen token too, so it may have one token more than the client asked for.
    """
    return {
        "text_offset": [begin + token.text_offset for token in tokens],
        "token_logprobs": [_number(token.chosen) for token in tokens],
        "tokens": [_name(token.chosen.token) for token in tokens],
        "top_logprobs": [
            {_name(each.token): _number(each) for each in (token.chosen, *token.top)}
            for token in tokens
        ],
    }


def echoed_logprobs(prompt: PromptReport, num_top: int) -> JSON:
    """The field `logprobs` of an echoed prompt, whose first token has no logprob."""
    names = _names(prompt)
    positions = [
        [(names[token_id], max(logprob, _MIN_LOGPROB)) for token_id, logprob, _ in entries]
        for entries in prompt.entries(num_top)
    ]
    return {
        "text_offset": prompt.offsets()[: 1 + len(positions)],
        "token_logprobs": [None, *(entries[0][1] for entries in positions)],
        "tokens": [names[prompt.token_ids[0]], *(entries[0][0] for entries in positions)],
        "top_logprobs": [None, *map(dict, positions)],
    }


def concatenate(first: JSON, then: JSON) -> JSON:
    """Concatenates two results of `text_logprobs`."""
    return {name: first[name] + then[name] for name in first}


def prompt_logprobs(prompt: PromptReport, num_top: int) -> list[JSON | None]:
    """The field `prompt_logprobs`, as in vLLM, for both endpoints: for each prompt token an object
    by token id, with the token and the `num_top` likeliest; for the first token null."""
    names = _names(prompt)
    return [
        None,
        *(
            {
                str(token_id): {
                    "logprob": max(logprob, _MIN_LOGPROB),
                    "rank": rank,
                    "decoded_token": names[token_id],
                }
                for token_id, logprob, rank in entries
            }
            for entries in prompt.entries(num_top)
        ),
    ]


def chat_logprobs(tokens: Sequence[PositionLogprobs]) -> JSON:
    """The field `logprobs` of a chat completion."""
    content = [
        {**_entry(token.chosen), "top_logprobs": list(map(_entry, token.top))} for token in tokens
    ]
    return {"content": content}


def _entry(candidate: Candidate) -> JSON:
    name, logprob = _name(candidate.token), _number(candidate)
    return {"token": name, "logprob": logprob, "bytes": list(candidate.token)}


def _number(candidate: Candidate) -> float:
    return max(candidate.logprob, _MIN_LOGPROB)


def _names(prompt: PromptReport) -> dict[int, str]:
    return {token_id: _name(token) for token_id, token in prompt.tokens.items()}


def _name(token: bytes) -> str:
    """The token's text. A part of a character is named by its bytes, so that different tokens do
    not share a name."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
