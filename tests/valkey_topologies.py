"""Replicated servers, clusters and Sentinels made of real Valkey processes, on free ports of
127.0.0.1."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import redis
from redis.crc import key_slot

from tests.conftest import Valkey
from tests.tls_front import Fronts
from tests.waiting import wait_until

NUM_SLOTS = 16384


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in made]


class TcpValkey(Valkey):
    """A server on a TCP port. Its password, if any, is also that of its primary. `announced`: the
    port at which others reach it, that of its front if it has one."""

    def __init__(self, directory: Path, port: int, *options: str) -> None:
        directory.mkdir(exist_ok=True)
        super().__init__(
            directory, "--port", str(port), "--bind", "127.0.0.1", "--repl-diskless-sync-delay",
            *("0", *options),
        )  # fmt: skip
        self.port = self.announced = port
        self.url = f"redis://127.0.0.1:{port}"

    def info(self) -> dict[str, str]:
        with redis.Redis.from_url(self.url) as client:
            return dict(client.info())

    def follow(self, primary: "TcpValkey") -> None:
        """Replicate `primary`; returns when the data has arrived."""
        self.command("REPLICAOF", "localhost", primary.announced)
        wait_until(self.is_replicating)

    def is_replicating(self) -> bool:
        return self.info().get("master_link_status") == "up"


@contextmanager
def replicated(
    directory: Path, number: int = 2, fronts: Fronts | None = None
) -> Iterator[list[TcpValkey]]:
    """A primary with its replicas."""
    servers, ports = [], free_ports(2 * number)
    for index, (port, announced) in enumerate(zip(ports[::2], ports[1::2], strict=True)):
        if fronts:
            fronts.before(port, announced)
        options = ("--replica-announce-ip", "localhost", "--replica-announce-port", str(announced))
        servers.append(TcpValkey(directory / f"server-{index}", port, *(options if fronts else ())))
        servers[-1].announced = announced if fronts else port
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for server in servers[1:]:
            server.follow(servers[0])
        yield servers


@contextmanager
def sentinel(directory: Path, primary: TcpValkey, fronts: Fronts | None = None) -> Iterator[str]:
    """A Sentinel that replaces the primary after half a second of silence; yields the URL of its
    service."""
    port, front_port = free_ports(2)
    if fronts:
        fronts.before(port, front_port)
    directory.mkdir()
    config = directory / "sentinel.conf"
    config.write_text(
        "sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
        f"sentinel monitor ledger localhost {primary.announced} 1\n"
        "sentinel down-after-milliseconds ledger 500\n"
        "sentinel failover-timeout ledger 3000\n"
    )
    server = Valkey(directory, "--port", str(port), "--bind", "127.0.0.1")
    server.run_with(str(config), "--sentinel")
    server.url = f"redis://127.0.0.1:{port}"
    try:
        server.start()
        wait_until(lambda: _num_replicas(server) == 1)
        yield (
            f"sentinels://localhost:{front_port}/ledger/0?ssl_ca_certs={fronts.ca}"
            if fronts
            else f"sentinel://127.0.0.1:{port}/ledger/0"
        )
    finally:
        server.kill()


def _num_replicas(server: Valkey) -> int:
    with redis.Redis.from_url(server.url) as client:
        return int(client.sentinel_master("ledger")["num-slaves"])


class Cluster:
    """`nodes` with equal shares of the slots, followed by one replica for each."""

    def __init__(
        self, directory: Path, num_primaries: int, with_replicas: bool, fronts: Fronts | None = None
    ) -> None:
        ports = free_ports(3 * num_primaries * (1 + with_replicas))
        self._fronts = fronts
        self.nodes = [
            self._node(directory / f"node-{port}", port, bus, front_port)
            for port, bus, front_port in zip(ports[::3], ports[1::3], ports[2::3], strict=True)
        ]
        self._buses = ports[1::3]
        self.primaries = self.nodes[:num_primaries]

    def _node(self, directory: Path, port: int, bus: int, front_port: int) -> TcpValkey:
        options = [
            *("--cluster-enabled", "yes", "--cluster-port", str(bus)),
            *("--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0"),
        ]
        if self._fronts:
            self._fronts.before(port, front_port)
            options += ["--cluster-announce-port", str(front_port)]
            options += ["--cluster-announce-hostname", "localhost"]
            options += ["--cluster-preferred-endpoint-type", "hostname"]
        node = TcpValkey(directory, port, *options)
        node.announced = front_port if self._fronts else port
        return node

    @property
    def url(self) -> str:
        hosts = ",".join(f"localhost:{node.announced}" for node in self.nodes[:2])
        if self._fronts:
            return f"rediss://{hosts}?ssl_ca_certs={self._fronts.ca}"
        return f"redis://{hosts}"

    def form(self) -> None:
        """Form the cluster; returns when every node knows that it is complete."""
        num = len(self.primaries)
        bounds = [index * NUM_SLOTS // num for index in range(num + 1)]
        for node, first, end in zip(self.primaries, bounds, bounds[1:], strict=False):
            node.command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node, primary in zip(self.nodes[num:], self.primaries, strict=False):
            wait_until(partial(self._knows_all, node))
            node.command("CLUSTER", "REPLICATE", self.node_id(primary))
            wait_until(node.is_replicating)
        for node in self.nodes:
            wait_until(partial(self._is_complete, node))

    def node_id(self, node: TcpValkey) -> str:
        return str(node.command("CLUSTER", "MYID").decode())

    def owner(self, key: str) -> TcpValkey:
        """The primary that has the key's slot, according to the first running node."""
        node = next(node for node in self.nodes if node.is_running)
        slot = key_slot(key.encode())
        for first, last, primary, *_ in node.command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.announced == primary[1])
        raise AssertionError(f"nobody has slot {slot}")

    def move(self, tag: str, target: TcpValkey) -> Callable[[], None]:
        """Begin to move the tag's slot; a call of the result completes the move."""
        slot, source = key_slot(tag.encode()), self.owner(tag)
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))

        def end() -> None:
            for key in source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                source.command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
            for node in (target, source, *self.nodes):
                if node.info()["role"] == "master":
                    node.command("CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))

        return end

    def _knows_all(self, node: TcpValkey) -> bool:
        listing = node.command("CLUSTER NODES").values()
        return sum("handshake" not in each["flags"] for each in listing) == len(self.nodes)

    def _is_complete(self, node: TcpValkey) -> bool:
        info = node.command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and self._knows_all(node)


@contextmanager
def cluster(
    directory: Path,
    num_primaries: int = 3,
    with_replicas: bool = False,
    fronts: Fronts | None = None,
) -> Iterator[Cluster]:
    made = Cluster(directory, num_primaries, with_replicas, fronts)
    with ExitStack() as stack:
        for node in made.nodes:
            stack.callback(node.kill)
            node.start()
        made.form()
        yield made
