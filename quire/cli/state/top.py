"""`quire top`: the dashboard of a gateway in a terminal."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from quire.addresses import http_url
from quire.cli.flags import AccessFlags
from quire.errors import Unreachable

if TYPE_CHECKING:
    from rich.console import RenderableType

_RETRY_S = 1.0


@dataclass(frozen=True)
class TopFlags(AccessFlags):
    """The gateway whose dashboard is shown."""

    url: Annotated[
        str, Option(metavar="URL", parser=http_url, help="the HTTP port of a gateway")
    ] = "http://127.0.0.1:8000"
    once: Annotated[
        bool, Option("--once", help="print the state once, and end; always so without a terminal")
    ] = False


def top(flags: TopFlags) -> None:
    """Show pools, workers and requests of a deployment, live. Ctrl-C ends it."""
    # Imported here, so that other commands start without them.
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from quire.cli.state.dashboard_feed import documents
    from quire.cli.state.top_screen import render

    console = Console()
    if flags.once or not console.is_terminal:
        console.print(render(next(documents(flags.url, flags.api_key, flags.tls_files))))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        shown: RenderableType = ""
        while True:
            try:
                for document in documents(flags.url, flags.api_key, flags.tls_files):
                    shown = render(document)
                    live.update(shown, refresh=True)
                reason = "the gateway has ended the connection"
            except Unreachable as error:
                reason = str(error)
            live.update(Group(Text(f"{reason}; trying again", style="red"), shown), refresh=True)
            time.sleep(_RETRY_S)
