"""`python -m services.prefill`: a prefill worker."""

from services.common.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()

import asyncio

from services.common.process import run_service
from services.prefill.config import PrefillSettings
from services.worker.lives import serve_worker


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> None:
    await serve_worker("prefill", settings, stop)


if __name__ == "__main__":
    run_service(PrefillSettings, serve)
