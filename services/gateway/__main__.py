"""`python -m services.gateway`: the gateway."""

from services.common.process import run_service
from services.gateway.config import GatewaySettings
from services.gateway.process import serve

if __name__ == "__main__":
    run_service(GatewaySettings, serve)
