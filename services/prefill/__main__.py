"""`python -m services.prefill`: a prefill worker."""

from services.common.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.common.runtime.process import run_service
from services.worker.config import PrefillSettings
from services.worker.liveness.rejoin import serve_worker

if __name__ == "__main__":
    run_service(PrefillSettings, serve_worker)
