"""Users that send one request after another and know every expected token."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from quire.client import Client
from quire.errors import QuireError, Unavailable, Unreachable
from quire.messages import Request
from quire.types import Sampling
from tests.chaos.cases import Case, Output
from tests.chaos.received import ReceivedStream, Violation
from tests.waiting import wait_until

REQUEST_LIMIT_S = 90.0
_RETRY_S = 0.2
_FAILED_S = 10.0


def cases_of(client: Client) -> list[Case]:
    """Greedy and sampled requests with their undisturbed outputs."""
    greedy = Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
    cases = [
        Case("greedy", "The following is a story about a town by the sea.", greedy),
        Case("sampled", "A block table is", replace(greedy, temperature=0.9, seed=11)),
        Case("greedy", "Paged attention reads the cache " * 20, greedy),
        Case("sampled", "Prefill and decode " * 12, replace(greedy, temperature=0.7, seed=5)),
    ]
    return [replace(case, outputs=(_output(client, case),)) for case in cases]


def _output(client: Client, case: Case) -> Output:
    with client.send(Request(case.prompt, case.sampling), REQUEST_LIMIT_S) as stream:
        output = Output.of(list(stream))
    assert len(output.tokens) == case.sampling.max_tokens
    return output


class Users:
    """`wrong`: streams with another token than the next one, or with too few. `broken`: streams
    that an error ended after their first token. `num_refused`: requests that were refused before it
    and sent again."""

    def __init__(self, client: Client, cases: Sequence[Case]) -> None:
        self.wrong: list[str] = []
        self.broken: list[str] = []
        self.num_refused = 0
        self._client = client
        self._cases = cases
        self._stop = threading.Event()
        self._last_begun = [0.0] * len(cases)
        self._has_token = [False] * len(cases)
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(len(cases))
        ]

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            self._send(number, self._cases[turn % len(self._cases)])
            turn += 1

    def _send(self, number: int, case: Case) -> None:
        begun, received = time.monotonic(), ReceivedStream(case)
        try:
            request = Request(case.prompt, case.sampling)
            with self._client.send(request, REQUEST_LIMIT_S) as stream:
                for delta in stream:
                    received.add(delta)
                    self._has_token[number] = True
            received.check_end()
            self._last_begun[number] = begun
        except Violation as violation:
            self.wrong.append(f"{case.kind}: {violation}")
        except QuireError as error:
            if not received.num_messages and isinstance(error, Unavailable | Unreachable):
                self.num_refused += 1
                self._stop.wait(_RETRY_S)
            else:
                self.broken.append(f"{case.kind}, {received}: {type(error).__name__}: {error}")
        finally:
            self._has_token[number] = False

    @property
    def violations(self) -> list[str]:
        return self.wrong + self.broken

    def wait_until_streaming(self, limit_s: float = REQUEST_LIMIT_S) -> None:
        """Wait until each user is in the middle of a stream."""
        self._wait(lambda: all(self._has_token), limit_s)

    def wait_until_served(self, limit_s: float = REQUEST_LIMIT_S) -> None:
        """Wait until each user has the whole answer to a request that began after this call."""
        now = time.monotonic()
        self._wait(lambda: min(self._last_begun) > now, limit_s)

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        def no_violation_and_it_holds() -> bool:
            assert not self.violations, self.violations
            return condition()

        wait_until(
            no_violation_and_it_holds,
            limit_s=limit_s,
            explain=lambda: f"{self.num_refused} requests were refused",
        )

    def end(self) -> None:
        """End the users once their last streams have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_LIMIT_S)
            assert not thread.is_alive(), "a stream does not end"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        self._stop.set()
        for thread in self._threads:  # before the client is closed
            thread.join(_FAILED_S)
