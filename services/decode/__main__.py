"""`python -m services.decode`: a decode worker."""

import asyncio
from importlib import import_module

from services.common.process import run_service
from services.decode.config import DecodeSettings
from services.worker.entry import announced


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> None:
    async with announced("decode", settings) as entry:
        # Imports torch for a second, which reads OpenMP's variables: only now are they set.
        await asyncio.to_thread(import_module, "services.decode.service")
        from services.decode.service import ROLE
        from services.worker.process import serve_worker

        await serve_worker(ROLE, settings, stop, entry)


if __name__ == "__main__":
    run_service(DecodeSettings, serve)
