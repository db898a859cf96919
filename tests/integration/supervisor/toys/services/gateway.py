"""A gateway that reports which other services run."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from quire.sockets import starting_socket
from quire.v1 import block_manager_pb2 as bm
from quire.v1 import inference_pb2 as inference
from quire.v1.block_manager_pb2_grpc import BlockManagerServicer, add_BlockManagerServicer_to_server
from quire.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from services.toy import run, run_dir


class Gateway(InferenceServicer, BlockManagerServicer):
    def ListModels(self, _request: Any, _context: Any) -> inference.ListModelsResponse:
        return inference.ListModelsResponse(models=[inference.Model(id="toys", dtype="none")])

    def ListPools(self, _request: Any, _context: Any) -> bm.ListPoolsResponse:
        return bm.ListPoolsResponse()

    def ListWorkers(self, _request: Any, _context: Any) -> bm.ListWorkersResponse:
        return bm.ListWorkersResponse(workers=list(_workers()))

    def Generate(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    def Embed(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    def Audit(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    def WatchBlocks(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    def DescribeBlocks(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError

    def DrainWorker(self, _request: Any, _context: Any) -> Any:
        raise NotImplementedError


def _workers() -> Any:
    for entry in (run_dir("gateway") / "members").iterdir():
        role, pid = entry.name.rsplit("-", 1)
        if os.path.exists(f"/proc/{pid}"):
            state = "WORKER_STATE_SERVING"
            yield bm.Worker(worker_id=entry.name, role=role, model="toys", state=state)


health = HealthServicer()
health.set("", HealthCheckResponse.SERVING)
server, operations = (grpc.server(ThreadPoolExecutor(max_workers=4)) for _ in range(2))
for each in (server, operations):
    add_InferenceServicer_to_server(Gateway(), each)
    add_HealthServicer_to_server(health, each)
add_BlockManagerServicer_to_server(Gateway(), operations)
server.add_insecure_port(f"127.0.0.1:{os.environ['QUIRE_GATEWAY_PORT']}")
port = int(os.environ["QUIRE_GATEWAY_PORT"])
path = starting_socket(run_dir("gateway"), socket.gethostname(), port)
operations.add_insecure_port(f"unix:{path}-bound")  # gRPC removes this path when it ends
Path(f"{path}-bound").rename(path)
server.start()
operations.start()
run("gateway")
