"""How an HTTP server leaves its port to the process that takes its place."""

import asyncio

import uvicorn

_POLL_S = 0.1


class Departure:
    """From `begun` on, the server accepts no connection, and the answer to each further request
    asks the client to close its connection. `ended` is set when no connection is open any more:
    after the longest answer, or when connections without requests have been kept long enough.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def of(self, server: uvicorn.Server) -> None:
        """Lets the server leave once `begun` is set."""
        await self.begun.wait()
        for each in server.servers:
            each.close()
        while server.server_state.connections:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(_POLL_S)
        self.ended.set()
