"""When a broken stream is continued, and when it is given up."""

import pytest
from grpc import StatusCode, aio

from quire import DeadlineExceeded, Overloaded, Unavailable, Unreachable
from quire.error_translation import translate_errors
from quire.errors import QuireError
from quire.messages import Request
from quire.progress import ACCEPTED_METADATA, Progress
from quire.types import Sampling
from quire.v1.inference_pb2 import GenerateResponse, SequenceDelta, Usage
from quire.v1.sampling_pb2 import FINISH_REASON_LENGTH
from tests.clock import Clock

GONE = Unreachable("no server answers", "unreachable")
ACCEPTED = ((ACCEPTED_METADATA, ""),)
SOME = GenerateResponse(deltas=[SequenceDelta(token_ids=[7, 8])])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def progress(clock: Clock, num_gateways: int = 1, timeout_s: float | None = None) -> Progress:
    return Progress(Request("Hi"), timeout_s, num_gateways, window_s=10.0, clock=clock)


def test_every_call_asks_for_the_same_and_says_what_came(clock: Clock) -> None:
    asked = progress(clock)
    first = asked.message()
    assert first.request_id
    assert first.sampling.HasField("seed")
    assert not first.HasField("received")
    name, seed, token = first.request_id, first.sampling.seed, first.resume_token
    assert len(token) == 43  # 256 bits
    asked.record_response(SOME)
    asked.record_response(SOME)
    asked.record_break(GONE)
    again = asked.message()
    (received,) = again.received.sequences
    assert (received.index, list(received.token_ids)) == (0, [7, 8, 7, 8])
    assert (again.request_id, again.sampling.seed, again.resume_token) == (name, seed, token)
    assert progress(clock).message().resume_token != token


def test_id_and_seed_of_the_user_stay(clock: Clock) -> None:
    asked = Progress(Request("Hi", Sampling(seed=5), request_id="mine"), None, 1, clock=clock)
    assert (asked.message().request_id, asked.message().sampling.seed) == ("mine", 5)


def test_a_single_gateway_of_which_nothing_was_heard_is_asked_once(clock: Clock) -> None:
    with pytest.raises(Unreachable):
        progress(clock).record_break(GONE)


def test_several_are_asked_again_also_where_nothing_was_heard(clock: Clock) -> None:
    """One gateway ends while another one is just returning."""
    asked = progress(clock, num_gateways=2)
    assert [asked.record_break(GONE) for _ in range(3)] == [0.0, 0.05, 0.05]
    assert asked.message().HasField("received")  # it may run there
    clock.now_s += 10.0
    with pytest.raises(Unreachable):
        asked.record_break(GONE)


def test_a_broken_stream_resumes_within_the_window(clock: Clock) -> None:
    asked = progress(clock, num_gateways=2)
    asked.record_response(SOME)
    pauses = [asked.record_break(GONE) for _ in range(6)]
    assert pauses == [0.0, 0.05, 0.05, 0.1, 0.1, 0.2]
    clock.now_s += 10.0
    with pytest.raises(Unreachable):
        asked.record_break(GONE)


def test_the_window_begins_anew_with_every_token(clock: Clock) -> None:
    asked = progress(clock)
    for _ in range(3):
        asked.record_response(SOME)
        asked.record_break(GONE)
        clock.now_s += 9.0
    asked.record_break(GONE)


def test_the_time_at_a_gateway_that_works_on_the_request_does_not_count(clock: Clock) -> None:
    """It had no token yet when it broke, 60 s after the first one broke. The other one is asked."""
    asked = progress(clock, num_gateways=2)
    for _ in range(2):
        asked.message()
        clock.now_s += 60.0
        assert asked.record_break(GONE, ACCEPTED) == 0.0
    assert asked.record_break(GONE) == 0.05, "the other one may be just returning"


def test_gateways_that_all_break_while_they_work_on_a_request_end_it(clock: Clock) -> None:
    """A request that no gateway survives is not sent for ever: the time until each one is back
    counts."""
    asked, num_sent = progress(clock, num_gateways=2), 0
    with pytest.raises(Unreachable):  # noqa: PT012
        while num_sent < 100:
            clock.now_s += asked.record_break(GONE, ACCEPTED if num_sent % 3 == 0 else ()) or 0.0
            clock.now_s += 0.5
            asked.message()
            num_sent += 1
    assert 10 < num_sent < 40


def test_the_only_gateway_is_asked_again_if_it_had_accepted_the_request(clock: Clock) -> None:
    asked = progress(clock)
    assert asked.record_break(GONE, ACCEPTED) == 0.05
    assert asked.record_break(GONE) == 0.1
    clock.now_s += 10.0
    with pytest.raises(Unreachable):
        asked.record_break(GONE)


def test_the_only_gateway_is_asked_again_if_the_call_came_just_as_it_stopped(clock: Clock) -> None:
    """gRPC answers such a call with CANCELLED. In an upgrade another gateway is there already."""
    with pytest.raises(Unreachable) as caught, translate_errors("here"):
        raise aio.AioRpcError(StatusCode.CANCELLED, aio.Metadata(), aio.Metadata())
    asked = progress(clock)
    assert asked.record_break(caught.value) == 0.05
    clock.now_s += 10.0
    with pytest.raises(Unreachable):
        asked.record_break(GONE)
    with pytest.raises(Unreachable):
        progress(clock).record_break(GONE)


def test_a_gateway_that_stops_is_one_that_is_gone(clock: Clock) -> None:
    asked = progress(clock)
    asked.record_response(SOME)
    asked.record_break(Unavailable("stopping", "draining"))


@pytest.mark.parametrize("status", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED])
def test_a_call_cut_by_a_stopping_server_is_a_break(clock: Clock, status: StatusCode) -> None:
    """The server sends gRPC's own statuses without a code of Quire, and the client did not
    cancel."""
    with pytest.raises(Unreachable) as caught, translate_errors("here"):
        raise aio.AioRpcError(status, aio.Metadata(), aio.Metadata())
    assert progress(clock, num_gateways=2).record_break(caught.value) == 0.0


@pytest.mark.parametrize(
    "error", [Unavailable("none", "no_worker"), Overloaded("full", "queue_full", 1.0)]
)
def test_an_answer_is_final(clock: Clock, error: QuireError) -> None:
    asked = progress(clock, num_gateways=2)
    asked.record_response(SOME)
    with pytest.raises(type(error)):
        asked.record_break(error)


def test_the_deadline_is_that_of_all_calls_together(clock: Clock) -> None:
    asked = progress(clock, timeout_s=5.0)
    asked.record_response(SOME)
    clock.now_s += 2.0
    assert asked.timeout_s() == 3.0
    asked.record_break(GONE)
    clock.now_s += 3.0
    with pytest.raises(DeadlineExceeded):
        asked.record_break(GONE)


def test_every_sequence_says_how_far_it_has_come(clock: Clock) -> None:
    asked = progress(clock)
    ended = SequenceDelta(index=2, token_ids=[5], finish_reason="FINISH_REASON_LENGTH")
    asked.record_response(GenerateResponse(deltas=[SequenceDelta(index=1, token_ids=[7])]))
    asked.record_response(GenerateResponse(deltas=[ended]))
    asked.record_response(GenerateResponse(deltas=[SequenceDelta(index=1, token_ids=[8])]))
    asked.record_break(GONE)
    sequences = asked.message().received.sequences
    received = {s.index: (list(s.token_ids), s.finish_reason) for s in sequences}
    assert received == {1: ([7, 8], 0), 2: ([5], FINISH_REASON_LENGTH)}


def test_a_break_behind_the_end_is_none(clock: Clock) -> None:
    asked = progress(clock)
    asked.record_response(GenerateResponse(deltas=SOME.deltas, usage=Usage(num_generated_tokens=2)))
    assert asked.record_break(GONE) is None
