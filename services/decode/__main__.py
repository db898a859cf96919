"""`python -m services.decode`: a decode worker."""

import asyncio

from services.common.process import run_service
from services.decode.config import DecodeSettings


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> None:
    # Imports torch, which reads OpenMP's variables: only now are they set.
    from services.decode.service import ROLE
    from services.worker.process import serve_worker

    await serve_worker(ROLE, settings, stop)


if __name__ == "__main__":
    run_service(DecodeSettings, serve)
