"""`quire bench`: load on a server, and what its clients see."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter

from quire.async_client import AsyncClient
from quire.bench.options import LoadOptions, ResultOptions, ServerOptions, WorkloadOptions
from quire.cli.flags import GatewayFlags
from quire.errors import NotAllowed, QuireError, Unreachable, UnreachableUrl
from quire.sizes import duration
from quire.types import Sampling

if TYPE_CHECKING:
    from quire.bench.run import Result
    from quire.bench.target import Target
    from quire.bench.workload import Session


def bench(
    gateway: GatewayFlags,
    server: ServerOptions,
    load: LoadOptions,
    workload: WorkloadOptions,
    results: ResultOptions,
    limits: Annotated[
        list[str] | None, Argument(metavar="[NAME:MS]...", help="further limits of --goodput")
    ] = None,
) -> int:
    """Send load to a server and measure what its clients see: docs/bench.md has the definitions.

    Exit status 1: no request was answered.
    """
    _check(server, load, workload, results)
    slo_ms = dict(map(_limit, [*(results.goodput or ()), *(limits or ())]))
    try:
        from quire.bench.target import RequestFailed
    except ImportError as error:
        raise QuireError(f"{error}: pip install 'quire-serve[bench]'", "no_bench") from error
    config = {
        "server": server.url or gateway.address,
        **{k: v for k, v in asdict(server).items() if k != "url"},
        **asdict(load),
        **{k: str(v) if isinstance(v, Path) else v for k, v in asdict(workload).items()},
    }
    try:
        sessions, num_sessions = _sessions(workload, load)
        load = replace(load, num_requests=num_sessions)
        result = asyncio.run(_run(gateway, server, sessions, load, slo_ms, config))
    except RequestFailed as error:
        kinds = {
            "no connection": UnreachableUrl if server.url else Unreachable,
            "http 401": NotAllowed,
        }
        raise kinds.get(error.kind, QuireError)(str(error), "bench") from error
    except ValueError as error:
        raise QuireError(str(error), "usage") from error
    _report(result, results)
    return 0 if result.summary["num_completed"] else 1


def _check(
    server: ServerOptions, load: LoadOptions, workload: WorkloadOptions, results: ResultOptions
) -> None:
    """Raise BadParameter for flags that do not go together."""
    if (load.request_rate is None) == (load.concurrency is None):
        raise BadParameter("choose one of --request-rate and --concurrency")
    if (workload.turns > 1 or server.chat) and workload.prompts == "ids":
        raise BadParameter("chats and --turns need text; --prompts ids sends none")
    path = results.json_file
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise BadParameter(f"{path} cannot be written: it is a directory, or in none")
    try:
        is_object = isinstance(json.loads(server.extra_body), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise BadParameter(f"{server.extra_body!r} is no JSON object", param_hint="--extra-body")


def _limit(text: str) -> tuple[str, float]:
    from quire.bench.summary import SLOS

    name, _, limit = text.partition(":")
    try:
        # vLLM calls it e2el.
        name = name.removesuffix("l")
        if name not in SLOS:
            raise ValueError(name)
        return name, duration(limit)
    except ValueError as error:
        names = ", ".join(f"{name}:MS" for name in SLOS)
        raise BadParameter(f"{text!r} is none of {names}", param_hint="--goodput") from error


def _sessions(
    flags: WorkloadOptions, load: LoadOptions
) -> tuple[Callable[[bool], "Iterator[Session]"], int | None]:
    """Return a function that makes the sessions of the warm-up (if its argument is true) or of the
    run, and the number of sessions to run."""
    from quire.bench.prompts import COMMON_WORDS, Prompts, single_token_words
    from quire.bench.workload import synthetic

    words = single_token_words(flags.tokenizer) if flags.tokenizer else COMMON_WORDS
    chosen = None if flags.prompts == "ids" else words

    def drawn(is_warmup: bool) -> "Iterator[Session]":
        seed = load.seed + (1 << 32) * is_warmup
        return synthetic(Prompts(seed, chosen, flags.vocab_size), flags)

    default = 100 if load.duration is None else None
    return drawn, load.num_requests or default


async def _run(
    gateway: GatewayFlags,
    server: ServerOptions,
    sessions: Callable[[bool], "Iterator[Session]"],
    load: LoadOptions,
    slo_ms: dict[str, float],
    config: dict[str, Any],
) -> "Result":
    from quire.bench.run import run
    from quire.cli.bench_live import live

    target, model = await _target(gateway, server)
    try:
        return await run(
            target,
            sessions,
            load,
            as_chat=server.chat or config["turns"] > 1,
            slo_ms=slo_ms,
            config=config | {"model": model},
            progress=live,
        )
    finally:
        await target.close()


async def _target(gateway: GatewayFlags, server: ServerOptions) -> "tuple[Target, str]":
    """Return the server and the name of the model."""
    from quire.bench.target import GrpcTarget, HttpTarget

    if server.url is None:
        sampling = Sampling(temperature=server.temperature, ignore_eos=server.ignore_eos)
        client = AsyncClient(
            gateway.address, resume_window_s=0.0, api_key=gateway.api_key, tls=gateway.tls_files
        )
        grpc = GrpcTarget(client, server.model, sampling, server.timeout)
        return grpc, server.model or "default model"
    fields = {"temperature": server.temperature} | json.loads(server.extra_body)
    if server.ignore_eos:
        fields |= {"ignore_eos": True}
    http = partial(
        HttpTarget,
        server.url,
        api_key=gateway.api_key,
        tls=gateway.tls_files,
        timeout_s=server.timeout,
        fields=fields,
    )
    model = server.model
    if not model:
        asking = http("")
        try:
            models = await asking.models()
        finally:
            await asking.close()
        if not models:
            raise QuireError(f"{server.url} serves no model", "no_model")
        model = models[0]
    return http(model), model


def _report(result: "Result", flags: ResultOptions) -> None:
    from quire.cli.bench_live import print_report

    if flags.json_file:
        requests = [record.as_json() for record in result.records]
        flags.json_file.write_text(json.dumps(result.as_json() | {"requests": requests}))
    if flags.json:
        print(json.dumps(result.as_json()))
    else:
        print_report(result.summary)
