"""The context of a call to a service without gRPC."""

from collections.abc import Sequence


class FakeContext:
    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self.initial_metadata: list[tuple[str, str]] = []

    def time_remaining(self) -> float | None:
        return self._timeout_s

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self.initial_metadata += metadata
