"""The tokens of fake workers: the next token is a function of all tokens before it. So a token that
is lost, repeated or changed changes every later one."""

import zlib
from collections.abc import Sequence

from quire.v1 import logprobs_pb2, sampling_pb2, ticket_pb2

FIRST_TOKEN, NUM_TOKENS = 97, 26
"""The tokens are the letters a to z of a byte-level vocabulary."""


def state_of(ticket: ticket_pb2.Ticket) -> ticket_pb2.TicketState:
    """The part of a ticket that a worker answers with."""
    return ticket_pb2.TicketState.FromString(ticket.SerializeToString())


def next_token(tokens: Sequence[int], index: int = 0) -> int:
    """The next token of the sequence with that index."""
    salt = f" of {index}" if index else ""
    return FIRST_TOKEN + zlib.crc32(f"{list(tokens)}{salt}".encode()) % NUM_TOKENS


def expected(prompt: Sequence[int], num_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def logprobs_of(tokens: Sequence[int], num_top: int) -> logprobs_pb2.Logprobs:
    """The logprobs of the last of these tokens: a number that depends on all of them."""
    return logprobs_pb2.Logprobs(
        logprob=-(zlib.crc32(repr(list(tokens)).encode()) % 1024) / 128,
        rank=1 + tokens[-1] % 7,
        top_token_ids=range(FIRST_TOKEN, FIRST_TOKEN + num_top),
        top_logprobs=[-each / 4 for each in range(num_top)],
    )


def told(
    tokens: Sequence[int], sampling: sampling_pb2.SamplingParams
) -> list[logprobs_pb2.Logprobs]:
    """The logprobs of the last token, if the request asks for them."""
    return [logprobs_of(tokens, sampling.logprobs)] if sampling.HasField("logprobs") else []
