"""`python -m services.worker --role prefill` or `--role decode`: a worker."""

from services.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from argparse import ArgumentParser

from services.runtime.process import run_service
from services.worker.config import DecodeSettings, PrefillSettings
from services.worker.liveness.rejoin import serve_worker

SETTINGS = {"prefill": PrefillSettings, "decode": DecodeSettings}

if __name__ == "__main__":
    parser = ArgumentParser("python -m services.worker", add_help=False)
    parser.add_argument("--role", choices=SETTINGS, required=True)
    given, others = parser.parse_known_args()
    run_service(SETTINGS[given.role], serve_worker, f"worker --role {given.role}", others)
