"""Logs refused calls: at most one line for each host and minute, however many calls it makes."""

import time
from collections.abc import Callable

from services.runtime.logging import get_logger

_REMIND_S = 60.0
_MAX_HOSTS = 1000

log = get_logger(__name__)


class RefusalLog:
    """Writes the event `event`, with the number of refusals since the host's last line."""

    def __init__(self, event: str, clock: Callable[[], float] = time.time) -> None:
        self._event = event
        self._clock = clock
        self._hosts: dict[str, tuple[float, int]] = {}  # host -> (next line at, refusals)

    def note(self, peer: str, **keys: str) -> None:
        """Note the refusal of a call. `peer` is its client, as host:port."""
        host, now = peer.rpartition(":")[0] or peer, self._clock()
        again_at, num_refused = self._hosts.get(host, (now, 0))
        if now >= again_at:
            log.warning(self._event, peer=peer, num_refused=num_refused + 1, **keys)
            again_at, num_refused = now + _REMIND_S, -1
        if len(self._hosts) >= _MAX_HOSTS:
            self._hosts.clear()
        self._hosts[host] = (again_at, num_refused + 1)
