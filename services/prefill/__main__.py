"""`python -m services.prefill`: a prefill worker."""

import asyncio
from importlib import import_module

from services.common.process import run_service
from services.prefill.config import PrefillSettings
from services.worker.entry import announced


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> None:
    async with announced("prefill", settings) as entry:
        # Imports torch for a second, which reads OpenMP's variables: only now are they set.
        await asyncio.to_thread(import_module, "services.prefill.service")
        from services.prefill.service import ROLE
        from services.worker.process import serve_worker

        await serve_worker(ROLE, settings, stop, entry)


if __name__ == "__main__":
    run_service(PrefillSettings, serve)
