"""`quire upgrade`: replaces the services of a run by processes of the installed version."""

import time
from typing import TYPE_CHECKING

from quire.cli.flags import Json, OperationsFlags
from quire.cli.output import print_json
from quire.errors import Unavailable, Unreachable

if TYPE_CHECKING:
    from quire.reports import Upgrade

_POLL_S = 0.2
_PATIENCE_S = 30.0
"""How long nobody may answer: while a gateway or the supervisor takes the place of another, a call
fails."""


def upgrade(gateway: OperationsFlags, as_json: Json = False) -> None:
    """Replace `quire serve` and each of its services by the installed version, without losing a
    request.

    A new gateway or worker serves before the old one leaves. If it does not serve, the upgrade ends
    there, and the old ones go on. If an upgrade is going on, the command follows it.
    """
    found = _ask(gateway, begin=True)
    num_shown = 0
    while True:
        if not as_json:
            print("".join(f"{step}\n" for step in found.steps[num_shown:]), end="", flush=True)
        num_shown = len(found.steps)
        if not found.is_running:
            break
        time.sleep(_POLL_S)
        found = _ask(gateway, begin=False)
    if as_json:
        print_json([found])
    if found.failure:
        raise Unavailable(f"the upgrade has ended early: {found.failure}", "upgrade_failed")


def _ask(gateway: OperationsFlags, *, begin: bool) -> "Upgrade":
    """Ask a gateway that is there now. Raises Unreachable if none has answered for some seconds."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with gateway.connect() as client:
                return client.upgrade(begin=begin)
        except (Unreachable, Unavailable):
            if time.monotonic() > give_up_at:
                raise
        time.sleep(_POLL_S)
