import asyncio

from services.common.text.stop_strings import StopMatcher
from services.common.ticket import FinishReason
from services.gateway.output import Output, Tally


class Letters:
    """A detokenizer of one letter a token."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


class NoMeter:
    def first_token(self, after_s: float) -> None: ...

    def tokens(self, num_tokens: int, after_s: float) -> None: ...


def output(*stops: str) -> Output:
    clock = asyncio.get_running_loop().time
    return Output("r1", Tally(3, 0.0), Letters(), StopMatcher(stops), (), NoMeter(), clock)  # type: ignore[arg-type]


async def test_what_comes_while_the_client_has_a_delta_is_not_lost() -> None:
    """The last token and the end arrive together while the reader is busy with the first."""
    written = output()
    written.write((97,), None)
    deltas = written.deltas()
    first = await anext(deltas)
    written.write((98,), FinishReason.LENGTH)
    written.close(None)
    rest = [delta async for delta in deltas]
    assert [first.text, *(delta.text for delta in rest)] == ["a", "b"]
    assert rest[-1].finish_reason is FinishReason.LENGTH
    assert rest[-1].usage is not None
    assert rest[-1].usage.num_generated_tokens == 2


async def test_a_stop_string_is_never_shown_and_what_follows_is_dropped() -> None:
    written = output("END")
    assert not written.write(tuple(map(ord, "abE")), None)
    assert written.write(tuple(map(ord, "NDxyz")), None)
    written.close(None)
    deltas = [delta async for delta in written.deltas()]
    assert "".join(delta.text for delta in deltas) == "ab"
    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert deltas[-1].stopped_by == "END"
