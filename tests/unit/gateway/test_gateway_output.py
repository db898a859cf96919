"""The text of one client's tokens, over a vocabulary of bytes."""

import asyncio
import itertools
from typing import Any

import pytest

from quire.types import Candidate
from services.gateway.output.delta import Delta, Received
from services.gateway.output.output import MAX_UNREAD_TOKENS, Output, RequestStats
from services.gateway.output.parser.message import CallFormat, MessageFormat, MessageParser, Parsing
from services.gateway.output.sequence import OutputSequence
from services.model.text.detokenizer import Detokenizer
from services.model.text.pieces import Pieces
from services.model.text.stop_strings import StopMatcher
from services.model.text.tokenizer import Tokenizer
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated
from services.protocol.ticket import FinishReason
from services.runtime.errors import InvalidRequest, Unavailable

BYTES = [bytes([byte]) for byte in range(256)]
END = 0


class CountingMeter:
    def __init__(self) -> None:
        self.first: list[float] = []
        self.later: list[tuple[int, float | None]] = []

    def first_token(self, after_s: float) -> None:
        self.first.append(after_s)

    def tokens(self, num_tokens: int, after_s: float | None) -> None:
        self.later.append((num_tokens, after_s))


def make(
    *stops: str,
    stop_token_ids: tuple[int, ...] = (),
    meter: CountingMeter | None = None,
    tokenizer: Tokenizer | None = None,
    num_sequences: int = 1,
    includes_end: bool = False,
    min_tokens: int = 0,
    parsing: Parsing | None = None,
) -> Output:
    """Its clock shows 1, 2, 3 ...; the request arrived at 0."""
    ticks = itertools.count(1.0)
    sequences = [
        OutputSequence(
            index,
            Detokenizer(Pieces(BYTES, BYTES)),
            StopMatcher(stops, included=includes_end),
            frozenset(stop_token_ids),
            tokenizer,
            None if parsing is None else MessageParser(parsing, "seed"),
            min_tokens=min_tokens,
        )
        for index in range(num_sequences)
    ]
    return Output(
        "r1",
        RequestStats(num_prompt_tokens=5, arrived_at=0.0),
        sequences,
        meter or CountingMeter(),
        lambda: next(ticks),
    )


async def read(output: Output) -> list[Delta]:
    async with asyncio.timeout(5):
        return [delta async for delta in output]


def write(
    output: Output,
    token_ids: tuple[int, ...],
    finish: FinishReason | None,
    logprobs: tuple[Logprobs, ...] = (),
) -> None:
    output.write(Generated("r1", 1, 0, 0, token_ids, finish, logprobs))


async def only(output: Output) -> Delta:
    """The only delta of an output that ends now."""
    output.close(None)
    (delta,) = await read(output)
    return delta


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


async def test_unread_tokens_become_one_delta() -> None:
    output = make()
    for char in "abc":
        write(output, ids(char), None)
    assert not output.has_ended
    write(output, ids("d"), FinishReason.LENGTH)
    assert output.has_ended
    delta = await only(output)
    assert (delta.text, delta.token_ids) == ("abcd", ids("abcd"))
    assert delta.finish_reason is FinishReason.LENGTH
    assert delta.usage is not None
    assert delta.usage.num_generated_tokens == 4
    assert delta.usage.time_to_first_token_ms == 1000


async def test_tokens_during_a_read_form_the_next_delta() -> None:
    output = make()
    write(output, ids("a"), None)
    deltas = output
    assert (await anext(deltas)).text == "a"
    write(output, ids("b"), None)
    write(output, ids("c"), FinishReason.LENGTH)
    output.close(None)
    assert [delta.text async for delta in deltas] == ["bc"]


async def test_a_character_is_never_split() -> None:
    output = make()
    euro = "€".encode()
    write(output, tuple(euro[:2]), None)
    deltas = output
    first = await anext(deltas)
    assert (first.text, first.token_ids) == ("", tuple(euro[:2]))
    write(output, tuple(euro[2:]), None)
    assert (await anext(deltas)).text == "€"
    write(output, tuple(euro[:1]), FinishReason.LENGTH)
    output.close(None)
    assert [delta.text async for delta in deltas] == ["\ufffd"]


async def test_a_stop_string_is_never_shown_and_the_rest_is_dropped() -> None:
    output = make("STOP")
    write(output, ids("go S"), None)
    assert not output.has_ended
    deltas = output
    assert (await anext(deltas)).text == "go "
    write(output, ids("TOP and more"), FinishReason.LENGTH)
    assert output.has_ended
    output.close(None)
    (last,) = [delta async for delta in deltas]
    assert (last.text, last.token_ids) == ("", ids("TOP"))
    assert (last.finish_reason, last.stopped_by) == (FinishReason.STOP, "STOP")
    assert last.usage is not None
    assert last.usage.num_generated_tokens == 7


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    output = make("STOP")
    write(output, ids("go STO"), FinishReason.LENGTH)
    delta = await only(output)
    assert (delta.text, delta.finish_reason) == ("go STO", FinishReason.LENGTH)


@pytest.mark.parametrize(("asked", "stopped_by"), [((END,), END), ((), None)])
async def test_the_token_that_stopped_it_is_no_text(
    asked: tuple[int, ...], stopped_by: int | None
) -> None:
    """An end-of-sequence token also stops a request that did not ask for it."""
    output = make(stop_token_ids=asked)
    write(output, (*ids("ab"), END), FinishReason.STOP)
    assert output.has_ended
    delta = await only(output)
    assert (delta.text, delta.token_ids) == ("ab", (*ids("ab"), END))
    assert (delta.finish_reason, delta.stopped_by) == (FinishReason.STOP, stopped_by)


async def test_an_error_comes_in_place_of_what_was_not_read() -> None:
    output = make()
    write(output, ids("a"), None)
    output.close(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await read(output)


async def test_a_reader_that_waits_hears_of_the_end() -> None:
    output = make()
    reading = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    output.close(None)
    assert await reading == []


async def test_unread_tokens_have_a_limit() -> None:
    output = make()
    write(output, (97,) * MAX_UNREAD_TOKENS, None)
    assert not output.is_neglected
    write(output, (97,), None)
    assert output.is_neglected


async def test_only_the_first_prefill_found_what_others_had_cached() -> None:
    output = make()
    output.stats.note_prefill(3)
    output.stats.note_prefill(64)
    assert output.stats.num_cached_tokens == 3


async def test_times_are_measured_from_arrival_and_from_token_to_token() -> None:
    meter = CountingMeter()
    output = make(meter=meter)
    write(output, ids("a"), None)
    write(output, ids("bc"), None)
    assert (meter.first, meter.later) == ([1.0], [(1, None), (2, 1.0)])


class Letters:
    """The part of a tokenizer that logprobs need, of a vocabulary of bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def telling(*stops: str) -> Output:
    tokenizer: Any = Letters()
    return make(*stops, tokenizer=tokenizer)


def told(*values: float) -> tuple[Logprobs, ...]:
    """One for each token, with the letter a as the likeliest."""
    return tuple(Logprobs(value, rank, (97,), (0.0,)) for rank, value in enumerate(values, 1))


async def test_tokens_come_with_their_logprobs_spelled_out() -> None:
    output = telling()
    write(output, ids("a"), None, told(-0.5))
    write(output, (*"€".encode(), END), FinishReason.STOP, told(-1.0, -2.0, -3.0, -4.0))
    delta = await only(output)
    spelled = [each.chosen.token for each in delta.logprobs]
    assert spelled == [b"a", b"\xe2", b"\x82", b"\xac", b"\0"]
    assert [each.chosen.logprob for each in delta.logprobs] == [-0.5, -1.0, -2.0, -3.0, -4.0]
    assert [each.chosen.rank for each in delta.logprobs] == [1, 1, 2, 3, 4]
    # Where each begins: the parts of a character where it does, what is no text at the end.
    assert [each.text_offset for each in delta.logprobs] == [0, 1, 1, 1, 2]
    assert all(each.top == (Candidate(97, 0.0, 1, b"a"),) for each in delta.logprobs)


async def test_tokens_after_a_stop_string_are_not_reported() -> None:
    output = telling("bc")
    write(output, ids("abcd"), None, told(-1.0, -2.0, -4.0, -8.0))
    delta = await only(output)
    assert (delta.text, delta.token_ids) == ("a", ids("abc"))
    assert [each.chosen.token for each in delta.logprobs] == [b"a", b"b", b"c"]


async def test_offsets_go_on_where_a_client_was() -> None:
    output = telling()
    output.replay([Received(0, ids("abc"))])
    write(output, ids("d"), FinishReason.LENGTH, told(-1.0))
    delta = await only(output)
    assert [each.text_offset for each in delta.logprobs] == [3]


async def test_unread_logprobs_count() -> None:
    """Each counts a quarter of a token: with 20 likeliest tokens, a client may have a sixth as many
    tokens unread."""
    output = telling()
    top = Logprobs(-1.0, 1, tuple(range(20)), (-2.0,) * 20)
    for _ in range(MAX_UNREAD_TOKENS * 4 // 25):
        write(output, ids("a"), None, (top,))
    assert not output.is_neglected
    for _ in range(10):
        write(output, ids("a"), None, (top,))
    assert output.is_neglected
    await anext(output)
    assert not output.is_neglected


async def test_a_matched_stop_string_can_be_shown() -> None:
    output = make("STOP", includes_end=True)
    write(output, ids("go STOP and more"), None)
    assert output.has_ended
    delta = await only(output)
    assert (delta.text, delta.token_ids, delta.stopped_by) == ("go STOP", ids("go STOP"), "STOP")

    output = make(stop_token_ids=ids("!"), includes_end=True)
    write(output, ids("ab!"), FinishReason.STOP)
    assert output.has_ended
    delta = await only(output)
    assert (delta.text, delta.stopped_by) == ("ab!", ids("!")[0])


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "ab|a"), (5, "ab|a"), (6, "ab|ab|")]
)
async def test_no_stop_string_counts_in_the_first_tokens(min_tokens: int, text: str) -> None:
    """`b|` is complete with the third and with the sixth token."""
    output = make("b|", min_tokens=min_tokens)
    write(output, ids("ab|ab|"), FinishReason.LENGTH)
    output.close(None)
    assert "".join(delta.text for delta in await read(output)) == text


async def test_received_tokens_count_for_min_tokens() -> None:
    output = make("|", min_tokens=2)
    output.replay([Received(0, ids("a|"))])
    write(output, ids("b|"), None)
    assert output.has_ended
    with pytest.raises(InvalidRequest, match="a stop string"):
        make("|", min_tokens=1).replay([Received(0, ids("a|"))])


THINK = MessageFormat(reasoning=("<think>", "</think>"))
HARMONY = MessageFormat(calls=CallFormat.HARMONY)


@pytest.mark.parametrize(
    ("parsing", "text", "reasoning"),
    [
        (Parsing(THINK), "<think>Why?</think>Yes", "Why?</think"),
        (Parsing(THINK), " <think>Why? <thi", "Why? <thi"),
        (Parsing(THINK), "No <think>Why?</think>", ""),
        (Parsing(THINK, begins_in_reasoning=True), "Why?</think>Yes", "Why?</think"),
        (Parsing(THINK, reasoning_is_over=True), "<think>Why?</think>", ""),
        (Parsing(MessageFormat()), "<think>Why?</think>", ""),
        (
            Parsing(HARMONY),
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
            "<|channel|>final<|message|>Yes",
            "Why?<|end|",
        ),
    ],
)
async def test_tokens_between_the_tags_are_counted(
    parsing: Parsing, text: str, reasoning: str
) -> None:
    """A tag ends with its last token. However the tokens come, and if the client has had some."""
    for num_received in (0, 9, len(text) - 1):
        output = make(parsing=parsing)
        if num_received:
            output.replay([Received(0, ids(text[:num_received]))])
        write(output, ids(text[num_received:-1]), None)
        write(output, ids(text[-1]), FinishReason.LENGTH)
        delta = await only(output)
        assert delta.num_reasoning_tokens == len(reasoning)


CALL = '<tool_call>{"name": "f", "arguments": {"city": "Rome", "unit": "C"}}</tool_call>'


@pytest.mark.parametrize(
    ("stop", "finish", "ends_with_calls"),
    [
        ((), FinishReason.STOP, True),
        ((), FinishReason.LENGTH, False),
        (("unit",), FinishReason.STOP, False),
        (("name",), FinishReason.STOP, False),
        (("</tool_call>",), FinishReason.STOP, True),
    ],
)
async def test_only_complete_calls_are_the_reason_of_an_end(
    stop: tuple[str, ...], finish: FinishReason, ends_with_calls: bool
) -> None:
    output = make(*stop, parsing=Parsing(MessageFormat(CallFormat.HERMES), ("f",)))
    write(output, (*ids(CALL), 0), finish)
    delta = await only(output)
    assert delta.ends_with_calls is ends_with_calls
    assert delta.is_in_call is (stop == ("unit",))


async def test_text_that_a_client_has_not_got_comes_once() -> None:
    """A stop string that had half arrived when the stream broke is still found, and not sent."""
    for more, text in (("OP and", ""), ("AY", "STAY")):
        output = make("STOP")
        output.replay([Received(0, ids("go ST"))])
        write(output, ids(more), FinishReason.LENGTH)
        output.close(None)
        assert "".join(delta.text for delta in await read(output)) == text
