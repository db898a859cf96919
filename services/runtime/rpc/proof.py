"""Lets two services prove to each other, for each call, that they know the deployment's secret.

    client                                              server
      │  metadata `quire-proof`: time.nonce.call          │  call   = HMAC(key, "call", ...)
      ├──────────────────────────────────────────────────▶│
      │  initial metadata `quire-proof`: answer           │  answer = HMAC(key, "answer", ...)
      │◀──────────────────────────────────────────────────┤

Both HMACs cover the method, the server's id, the time and the nonce. So an intercepted proof is
valid for no other method, no other server and no second call, and a process that took over a dead
server's address cannot answer. The data of the connection is not protected; that needs TLS.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from grpc import aio

from services.runtime.errors import Unauthenticated
from services.runtime.rpc.refusal_log import RefusalLog

METADATA = "quire-proof"
MAX_AGE_S = 60.0
"""The most that two hosts' clocks may differ; a nonce is remembered for twice as long."""

Metadata = Iterable[tuple[str, str | bytes]]


class Proof:
    """A client's proof for one call of `method` (/package.Service/Method) at one server."""

    def __init__(self, key: bytes, method: str, server_id: str) -> None:
        self._key = key
        self._server_id = server_id
        self._about = (method, server_id, str(time.time_ns() // 1_000_000), secrets.token_hex(16))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        _, _, sent_unix_ms, nonce = self._about
        code = _code(self._key, "call", *self._about)
        return ((METADATA, f"{sent_unix_ms}.{nonce}.{code}"),)

    def check(self, initial_metadata: Metadata | None) -> None:
        """Check the server's answer. Raises Unauthenticated if it does not prove the secret."""
        answer = _value(initial_metadata)
        if not _equal(answer, _code(self._key, "answer", *self._about)):
            raise Unauthenticated(
                f"the server at the address of {self._server_id} does not prove this deployment's "
                "secret"
            )


class Guard:
    """Admits the calls to one server whose clients prove the secret."""

    def __init__(self, key: bytes, server_id: str, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._server_id = server_id
        self._clock = clock
        self._nonces: dict[str, float] = {}  # nonce -> expiry time, in this order
        self._refusals = RefusalLog("peer_refused", clock)

    async def admit(self, method: str, context: aio.ServicerContext[Any, Any]) -> None:
        """Check the client's proof and answer it in the initial metadata. Raises
        Unauthenticated."""
        try:
            answer = self.answer(method, context.invocation_metadata())
        except Unauthenticated as error:
            self._refusals.note(context.peer(), method=method, reason=str(error))
            raise
        await context.send_initial_metadata(((METADATA, answer),))

    def answer(self, method: str, metadata: Metadata | None) -> str:
        """Check the client's proof in `metadata`; returns the server's own proof. Raises
        Unauthenticated."""
        proof = _value(metadata)
        if not proof:
            raise Unauthenticated(
                "this service is for services of its own deployment only, which prove the "
                "deployment's secret; clients talk to a gateway"
            )
        sent_unix_ms, nonce, code = (*proof.split("."), "", "")[:3]
        about = (method, self._server_id, sent_unix_ms, nonce)
        if not _equal(code, _code(self._key, "call", *about)):
            raise Unauthenticated(
                f"the proof was made with another secret, or not for {method} of {self._server_id}"
            )
        self._take(nonce, int(sent_unix_ms) / 1000)
        return _code(self._key, "answer", *about)

    def _take(self, nonce: str, sent_at: float) -> None:
        """Mark the nonce as used. Unauthenticated: the proof is too old, or was used before. Only
        clients that know the secret can add nonces."""
        now = self._clock()
        age_s = now - sent_at
        if abs(age_s) > MAX_AGE_S:
            raise Unauthenticated(
                f"by this host's clock the proof is {age_s:.0f} s old, and {MAX_AGE_S:g} s are the "
                "limit: set the clocks of both hosts"
            )
        while self._nonces and next(iter(self._nonces.values())) < now:
            del self._nonces[next(iter(self._nonces))]
        if nonce in self._nonces:
            raise Unauthenticated("the proof has been used before")
        # If the client's clock is ahead, its proof stays valid for up to twice as long.
        self._nonces[nonce] = now + 2 * MAX_AGE_S


def _code(key: bytes, *about: str) -> str:
    # No part contains a line feed: methods and ids are names; time and nonce have only digits.
    return hmac.digest(key, "\n".join(about).encode(), "sha256").hex()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _value(metadata: Metadata | None) -> str:
    found = next((value for key, value in metadata or () if key == METADATA), "")
    return found if isinstance(found, str) else ""
