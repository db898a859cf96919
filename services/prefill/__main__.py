"""`python -m services.prefill`: a prefill worker."""

import asyncio

from services.common.process import run_service
from services.prefill.config import PrefillSettings


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> None:
    # Imports torch, which reads OpenMP's variables: only now are they set.
    from services.prefill.service import ROLE
    from services.worker.process import serve_worker

    await serve_worker(ROLE, settings, stop)


if __name__ == "__main__":
    run_service(PrefillSettings, serve)
