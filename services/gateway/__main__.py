"""`python -m services.gateway`: runs a gateway."""

from services.common.runtime.starting import end_on_signals

if __name__ == "__main__":
    end_on_signals()

from services.common.runtime.process import run_service
from services.gateway.config import GatewaySettings
from services.gateway.process import serve

if __name__ == "__main__":
    run_service(GatewaySettings, serve)
