"""`python -m services.decode`: a decode worker."""

from services.common.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.common.runtime.process import run_service
from services.worker.config import DecodeSettings
from services.worker.liveness.rejoin import serve_worker

if __name__ == "__main__":
    run_service(DecodeSettings, serve_worker)
