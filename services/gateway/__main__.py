"""`python -m services.gateway`: runs a gateway."""

from services.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.gateway.config import GatewaySettings
from services.gateway.process import serve
from services.runtime.process import run_service

if __name__ == "__main__":
    run_service(GatewaySettings, serve)
