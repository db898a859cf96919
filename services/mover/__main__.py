"""`python -m services.mover`: a mover."""

from services.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.mover.config import MoverSettings
from services.mover.process import serve
from services.runtime.process import run_service

if __name__ == "__main__":
    run_service(MoverSettings, serve)
