"""`python -m services.decode`: a decode worker."""

from services.common.runtime.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()

import asyncio

from services.common.runtime.process import run_service
from services.decode.config import DecodeSettings
from services.worker.liveness.rejoin import serve_worker


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> None:
    await serve_worker("decode", settings, stop)


if __name__ == "__main__":
    run_service(DecodeSettings, serve)
