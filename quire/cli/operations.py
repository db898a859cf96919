"""The operator's commands: `quire health`, `models`, `workers`, `pools`, `audit`, `drain`,
`scale`."""

import argparse
import json
import sys
import time

from quire.cli.terminal import (
    Columns,
    Commands,
    add_client_command,
    add_operations_command,
    connect,
    percent,
    print_items,
    print_json,
    size,
)
from quire.client import Client
from quire.errors import DeadlineExceeded, Unavailable
from quire.types import Model, Pool, PoolAudit, Worker

_POLL_S = 0.2

_MODEL_COLUMNS: Columns[Model] = {
    "MODEL": lambda model: model.id,
    "CONTEXT": lambda model: model.max_model_len,
    "BLOCK SIZE": lambda model: model.block_size,
    "DTYPE": lambda model: model.dtype,
}
_WORKER_COLUMNS: Columns[Worker] = {
    "WORKER": lambda worker: worker.worker_id,
    "ROLE": lambda worker: worker.role,
    "STATE": lambda worker: worker.state,
    "ADDRESS": lambda worker: worker.address,
    "POOL": lambda worker: worker.pool_id,
    "RUNNING": lambda worker: worker.num_running,
    "WAITING": lambda worker: worker.num_waiting,
    "FREE SLOTS": lambda worker: worker.num_free_slots,
    "KERNELS": lambda worker: _kernels(worker),
}
_POOL_COLUMNS: Columns[Pool] = {
    "POOL": lambda pool: pool.pool_id,
    "MODEL": lambda pool: pool.model,
    "MEMORY": lambda pool: size(pool.num_blocks * pool.block_bytes),
    "BLOCKS": lambda pool: pool.num_blocks,
    "FREE": lambda pool: pool.num_free,
    "CACHED": lambda pool: pool.num_cached,
    "HELD": lambda pool: pool.num_held,
    "WAITING": lambda pool: pool.num_waiters,
    "HIT RATE": lambda pool: percent(pool.num_prefix_hits, pool.num_prefix_queries),
    "LEDGER": lambda pool: "recovering" if pool.recovering else "whole",
}
_AUDIT_COLUMNS: Columns[PoolAudit] = {
    "POOL": lambda found: found.pool_id,
    "BLOCKS": lambda found: found.num_blocks,
    "FREE": lambda found: found.num_free,
    "CACHED": lambda found: found.num_cached,
    "HELD": lambda found: found.num_held,
    "HOLDERS": lambda found: found.num_holders,
    "REFERENCES": lambda found: found.num_references,
    "LEDGER": lambda found: _ledger(found),
    "LAWS": lambda found: _laws(found),
}


def add_commands(commands: Commands) -> None:
    add_client_command(
        commands, "health", health, help_text="exit status 0 if the service at the address serves"
    )
    add_client_command(commands, "models", models, help_text="list the models being served")
    add_operations_command(
        commands, "workers", workers, help_text="list the workers and their load"
    )
    add_operations_command(commands, "pools", pools, help_text="list the pools and their blocks")
    audit_command = add_operations_command(
        commands,
        "audit",
        audit,
        help_text="recount every block reference; exit status 1 if a law is broken",
    )
    audit_command.add_argument("--pool", default="", metavar="ID", help="default: all pools")
    drain_command = add_operations_command(
        commands, "drain", drain, help_text="move a worker's requests to others, then let it exit"
    )
    drain_command.add_argument("worker", metavar="WORKER", help="its id (`quire workers`)")
    drain_command.add_argument(
        "--force", action="store_true", help="drain it even if it is the last of its role on a pool"
    )
    _add_wait_flags(drain_command, "wait until the worker has left")
    scale_command = add_operations_command(
        commands, "scale", scale, help_text="start or drain workers of a `quire serve`"
    )
    scale_command.add_argument(
        "numbers", nargs="+", type=_number_of_workers, metavar="ROLE=N", help="decode=3, prefill=2"
    )
    _add_wait_flags(scale_command, "wait until these workers serve")


def _add_wait_flags(command: argparse.ArgumentParser, help_text: str) -> None:
    command.add_argument("--wait", action="store_true", help=help_text)
    command.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="limit of --wait; %(default)s"
    )


def _number_of_workers(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither decode=N nor prefill=N")
    return role, int(number)


def _kernels(worker: Worker) -> str:
    """The worker's backend, instruction set or GPU, dtype, and how weights and KV are quantized."""
    names = [worker.engine.get(key, "") for key in ("backend", "isa", "dtype", "quantize")]
    if worker.engine.get("kv_dtype") == "int8":
        names.append("kv-int8")
    return " ".join(name for name in names if name not in ("", "none"))


def health(args: argparse.Namespace) -> int:
    """Check one service; every service of Quire answers, workers included."""
    with connect(args) as client:
        is_ready = client.is_ready()
    if args.json:
        print(json.dumps({"ready": is_ready}))
    else:
        print("ready" if is_ready else "not ready")
    return 0 if is_ready else 1


def models(args: argparse.Namespace) -> int:
    with connect(args) as client:
        print_items(args, _MODEL_COLUMNS, client.models())
    return 0


def workers(args: argparse.Namespace) -> int:
    with connect(args) as client:
        print_items(args, _WORKER_COLUMNS, client.workers())
    return 0


def pools(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.pools()
    print_items(args, _POOL_COLUMNS, found)
    for pool in found:
        if pool.missing_worker_ids and not args.json:
            print(f"{pool.pool_id} waits for {', '.join(pool.missing_worker_ids)}")
    return 0


def audit(args: argparse.Namespace) -> int:
    with connect(args) as client:
        audits = client.audit(args.pool)
    print_items(args, _AUDIT_COLUMNS, audits)
    for found in audits:
        for violation in found.violations:
            print(f"quire: {found.pool_id}: {violation}", file=sys.stderr)
    return 1 if any(found.violations for found in audits) else 0


def _ledger(found: PoolAudit) -> str:
    """Whether the audit could check the ledger."""
    if found.recovering:
        return "recovering"
    return "checked" if found.ledger_checked else "too busy"


def _laws(found: PoolAudit) -> str:
    """Whether the laws hold."""
    if found.violations:
        return f"{len(found.violations)} broken"
    return "not known" if found.recovering else "hold"


def drain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        num_running = client.drain(args.worker, force=args.force)
        if not args.json:
            print(f"{args.worker} takes no new work; it still runs {num_running} requests")
        if args.wait:
            _wait_until_left(client, args.worker, args.timeout)
            if not args.json:
                print(f"{args.worker} has left")
    if args.json:
        print(json.dumps({"num_running": num_running, "left": args.wait}))
    return 0


def _wait_until_left(client: Client, worker_id: str, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while any(worker.worker_id == worker_id for worker in client.workers()):
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(f"{worker_id} is still there after {timeout_s:g} s", "timeout")
        time.sleep(_POLL_S)


def scale(args: argparse.Namespace) -> int:
    wanted = dict(args.numbers)
    with connect(args) as client:
        scaled = client.scale(num_prefill=wanted.get("prefill"), num_decode=wanted.get("decode"))
        if not args.json:
            for verb, names in (("start", scaled.starting), ("leave", scaled.leaving)):
                if names:
                    print(f"to {verb}: {', '.join(names)}")
        if args.wait:
            _wait_until_scaled(client, wanted, args.timeout)
        if args.json:
            print_json([scaled])
        elif args.wait or not (scaled.starting or scaled.leaving):
            print(f"{scaled.num_prefill} prefill and {scaled.num_decode} decode workers")
    return 0


def _wait_until_scaled(client: Client, wanted: dict[str, int], timeout_s: float) -> None:
    """Wait until exactly the wanted workers are registered and all of them serve.

    Unavailable: a worker fails to start again and again. DeadlineExceeded: `timeout_s` has passed.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        workers = [worker for worker in client.workers() if worker.role in wanted]
        numbers = {role: sum(worker.role == role for worker in workers) for role in wanted}
        if numbers == wanted and all(worker.state == "serving" for worker in workers):
            return
        for name, reason in client.scale().failing.items():
            if name.rpartition("-")[0] in wanted:
                text = f"{name} does not start: {reason} (it is started again and again)"
                raise Unavailable(text, "worker_does_not_start")
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(f"after {timeout_s:g} s there are {numbers}", "timeout")
        time.sleep(_POLL_S)
