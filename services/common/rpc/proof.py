"""How two services prove to each other, for each call, that they have the deployment's secret.

    client                                              server
      │  metadata `quire-proof`: time.nonce.call          │  call   = HMAC(key, "call", ...)
      ├──────────────────────────────────────────────────▶│
      │  initial metadata `quire-proof`: answer           │  answer = HMAC(key, "answer", ...)
      │◀──────────────────────────────────────────────────┤

Both cover the method, the server's id, the time and the nonce, so that a proof that somebody
overheard opens neither another method, nor another server, nor the same one a second time, and a
process that only has a dead server's address cannot answer. The bytes of the connection are not
protected: that needs TLS (docs/adr/0098).
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from grpc import aio

from services.common.errors import Unauthenticated
from services.common.runtime.logging import get_logger

METADATA = "quire-proof"
MAX_AGE_S = 60.0
"""How far the clocks of two hosts may be apart, and how long a nonce is remembered."""
_REMIND_S = 60.0
_MAX_PEERS = 1000

if TYPE_CHECKING:  # generic in the stubs only
    _Context = aio.ServicerContext[Any, Any]
else:
    _Context = aio.ServicerContext

Metadata = Iterable[tuple[str, str | bytes]]

log = get_logger(__name__)


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
        """Unauthenticated: the server has not answered as one that has the secret."""
        answer = _value(initial_metadata)
        if not _equal(answer, _code(self._key, "answer", *self._about)):
            raise Unauthenticated(
                f"the server at the address of {self._server_id} does not prove this deployment's "
                "secret"
            )


class Guard:
    """Admits calls to one server whose clients prove the secret."""

    def __init__(self, key: bytes, server_id: str, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._server_id = server_id
        self._clock = clock
        self._nonces: dict[str, float] = {}  # -> forgotten at, in this order
        self._refusals: dict[str, tuple[float, int]] = {}  # peer -> (logged again at, refused)

    async def admit(self, method: str, context: _Context) -> None:
        """Answer the client's proof, in the initial metadata. Unauthenticated."""
        try:
            answer = self.answer(method, context.invocation_metadata())
        except Unauthenticated as error:
            self._report(method, context.peer(), str(error))
            raise
        await context.send_initial_metadata(((METADATA, answer),))

    def answer(self, method: str, metadata: Metadata | None) -> str:
        """This server's proof for a client that has proven the secret. Unauthenticated."""
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
        """Each nonce counts once, while its proof is young enough. Only clients with the secret
        fill this memory."""
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
        # A proof from a clock that is ahead stays young for twice as long.
        self._nonces[nonce] = now + 2 * MAX_AGE_S

    def _report(self, method: str, peer: str, reason: str) -> None:
        """One line a host, and one more a minute while it goes on."""
        host, now = peer.rpartition(":")[0], self._clock()
        again_at, num_refused = self._refusals.get(host, (now, 0))
        if now >= again_at:
            log.warning(
                "peer_refused",
                peer=peer,
                method=method,
                reason=reason,
                num_refused=num_refused + 1,
            )
            again_at, num_refused = now + _REMIND_S, -1
        if len(self._refusals) >= _MAX_PEERS:
            self._refusals.clear()
        self._refusals[host] = (again_at, num_refused + 1)


def _code(key: bytes, *about: str) -> str:
    # A part holds no line feed: methods and ids are names, and a time and a nonce have digits only.
    return hmac.digest(key, "\n".join(about).encode(), "sha256").hex()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _value(metadata: Metadata | None) -> str:
    found = next((value for key, value in metadata or () if key == METADATA), "")
    return found if isinstance(found, str) else ""
