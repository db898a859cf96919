"""`python -m services.mover`: a mover."""

from services.common.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.common.runtime.process import run_service
from services.mover.config import MoverSettings
from services.mover.process import serve

if __name__ == "__main__":
    run_service(MoverSettings, serve)
