"""Creates the dashboard's parts and connects them to the gateway's."""

from starlette.requests import Request
from starlette.routing import Route

from services.common.runtime.metrics import GatewayMetrics
from services.gateway.access.caller import require_operator
from services.gateway.dashboard.access import DashboardSetting, check_local
from services.gateway.dashboard.block_maps import BlockMaps
from services.gateway.dashboard.document import DashboardDocument
from services.gateway.dashboard.feed import Feed
from services.gateway.dashboard.routes import DashboardRoutes
from services.gateway.frontend.relay import Relay
from services.gateway.intake.identity import client_id
from services.gateway.wiring import Wiring


def make_dashboard(
    setting: DashboardSetting,
    wiring: Wiring,
    metrics: GatewayMetrics,
    block_manager: Relay,
    *,
    has_keys: bool,
) -> tuple[Feed, list[Route]]:
    """The feed, and the routes that serve the dashboard; none if it is off. `has_keys`: API keys
    are on, so that it needs an operator's."""

    def requests() -> dict[str, str]:
        running = wiring.dispatcher.lifecycles
        return {each.tickets.holder_id: client_id(each.id) for each in running}

    def check(request: Request) -> None:
        if has_keys:
            require_operator()
        elif setting == "auto":
            check_local(request)

    block_maps = BlockMaps(block_manager, requests)
    document = DashboardDocument(
        wiring.gateway_id, wiring.directory, wiring.dispatcher, metrics, wiring.ended, block_maps
    )
    feed = Feed(document.build)
    routes = DashboardRoutes(feed, block_maps, check).routes()
    return feed, [] if setting == "off" else routes
