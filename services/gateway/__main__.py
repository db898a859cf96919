"""`python -m services.gateway`: runs a gateway."""

from services.common.runtime.starting import begin_start

if __name__ == "__main__":
    begin_start()

from services.common.runtime.process import run_service
from services.gateway.config import GatewaySettings
from services.gateway.process import serve

if __name__ == "__main__":
    run_service(GatewaySettings, serve)
