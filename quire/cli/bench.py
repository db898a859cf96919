"""`quire bench`: load on a server, and what its clients see."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter, Option

from quire.cli.flags import GatewayFlags
from quire.errors import QuireError, Unreachable
from quire.sizes import duration
from quire.types import Sampling

if TYPE_CHECKING:
    from quire.bench.run import Result, Schedule
    from quire.bench.target import Target
    from quire.bench.workload import Session

_server = partial(Option, rich_help_panel="Server", show_default=False)
_load = partial(Option, rich_help_panel="Load", show_default=False)
_work = partial(Option, rich_help_panel="Workload")
_result = partial(Option, rich_help_panel="Results", show_default=False)


@dataclass(frozen=True)
class ServerFlags:
    """Which server, and how to ask it. Without --url: Quire's gateway at --address, over gRPC."""

    url: Annotated[
        str | None,
        _server(metavar="URL", help="an OpenAI-compatible server, such as http://host:8000"),
    ] = None
    model: Annotated[
        str, _server(metavar="NAME", help="default: the first one that the server lists")
    ] = ""
    chat: Annotated[
        bool, _server("--chat", help="send messages through the chat template; default: text")
    ] = False
    api_key: Annotated[str | None, _server(metavar="KEY", envvar="OPENAI_API_KEY")] = None
    timeout: Annotated[
        float, _server(metavar="S", min=0.001, help="limit of a request; default: 600")
    ] = 600.0
    temperature: Annotated[float, _server(metavar="T", help="default: 0, greedy")] = 0.0
    ignore_eos: Annotated[
        bool,
        _server(
            help="generate exactly the wanted number of tokens, where the server has vLLM's field "
            "ignore_eos; default: on"
        ),
    ] = True
    extra_body: Annotated[
        str, _server(metavar="JSON", help="further fields of each HTTP request")
    ] = "{}"


@dataclass(frozen=True)
class LoadFlags:
    """When requests are sent."""

    request_rate: Annotated[
        float | None,
        _load(metavar="R", min=1e-6, help="open loop: R sessions a second, at random (Poisson)"),
    ] = None
    concurrency: Annotated[
        int | None, _load(metavar="N", min=1, help="closed loop: N sessions at a time")
    ] = None
    num_requests: Annotated[
        int | None,
        _load(metavar="N", min=1, help="number of sessions; default: 100, a whole trace"),
    ] = None
    duration: Annotated[
        float | None, _load(metavar="S", min=0.001, help="begin no session after S seconds")
    ] = None
    ramp: Annotated[
        float, _load(metavar="S", min=0, help="raise rate or concurrency over S seconds")
    ] = 0.0
    warmup: Annotated[
        int, _load(metavar="N", min=0, help="requests before, which do not count; default: 2")
    ] = 2
    seed: Annotated[int, _load(metavar="N", help="of prompts and times; default: 0")] = 0


@dataclass(frozen=True)
class WorkloadFlags:
    """What is asked. Lengths are in tokens."""

    prompt_len: Annotated[int, _work(metavar="N", min=1)] = 512
    output_len: Annotated[int, _work(metavar="N", min=1)] = 128
    spread: Annotated[
        float, _work(metavar="F", min=0, max=1, help="0.2: lengths from 80 to 120 %")
    ] = 0.0
    prefix_len: Annotated[
        int, _work(metavar="N", min=0, help="a shared prefix before each prompt")
    ] = 0
    num_prefixes: Annotated[int, _work(metavar="N", min=1, help="different prefixes")] = 1
    turns: Annotated[
        int, _work(metavar="N", min=1, help="requests of a session, each after the answer (chat)")
    ] = 1
    trace: Annotated[
        Path | None,
        _work(metavar="FILE", exists=True, dir_okay=False, help="replay a trace, Mooncake's JSONL"),
    ] = None
    trace_speed: Annotated[float, _work(metavar="F", min=1e-6, help="2: twice as fast")] = 1.0
    trace_scale: Annotated[float, _work(metavar="F", min=1e-6, help="0.1: a tenth as long")] = 1.0
    prompts: Annotated[
        Literal["text", "ids"], _work(help="text of common words, or token ids (exact lengths)")
    ] = "text"
    tokenizer: Annotated[
        Path | None,
        _work(
            metavar="FILE", exists=True, dir_okay=False, help="tokenizer.json: text of exact length"
        ),
    ] = None
    vocab_size: Annotated[int, _work(metavar="N", min=301, help="of --prompts ids")] = 1000


@dataclass(frozen=True)
class ResultFlags:
    """What is done with the figures."""

    goodput: Annotated[
        list[str] | None,
        _result(
            metavar="NAME:MS",
            help="count requests within these limits: ttft, tpot, e2e; such as ttft:500 tpot:50",
        ),
    ] = None
    html: Annotated[Path | None, _result(metavar="FILE", help="write a report with charts")] = None
    json_file: Annotated[
        Path | None, _result(metavar="FILE", help="write the figures and every request")
    ] = None
    json: Annotated[bool, _result("--json", help="print JSON for scripts")] = False


def bench(
    gateway: GatewayFlags,
    server: ServerFlags,
    load: LoadFlags,
    workload: WorkloadFlags,
    results: ResultFlags,
    limits: Annotated[
        list[str] | None, Argument(metavar="[NAME:MS]...", help="further limits of --goodput")
    ] = None,
) -> int:
    """Send load to a server and measure what its clients see: docs/bench.md has the definitions.

    Exit status 1: no request was answered.
    """
    _check(server, load, workload)
    slo_ms = dict(map(_limit, [*(results.goodput or ()), *(limits or ())]))
    try:
        from quire.bench.target import RequestFailed
    except ImportError as error:
        raise QuireError(f"{error}: pip install 'quire-serve[bench]'", "no_bench") from error
    config = {
        "server": server.url or gateway.address,
        **{k: v for k, v in asdict(server).items() if k not in ("url", "api_key")},
        **asdict(load),
        **{k: str(v) if isinstance(v, Path) else v for k, v in asdict(workload).items()},
    }
    try:
        sessions, num_sessions = _sessions(workload, load)
        result = asyncio.run(
            _run(gateway, server, sessions, _schedule(load, num_sessions), slo_ms, config)
        )
    except RequestFailed as error:
        kind = Unreachable if error.kind == "no connection" else QuireError
        raise kind(str(error), "bench") from error
    except ValueError as error:
        raise QuireError(str(error), "usage") from error
    _report(result, results)
    return 0 if result.summary["num_completed"] else 1


def _check(server: ServerFlags, load: LoadFlags, workload: WorkloadFlags) -> None:
    """Raises BadParameter for flags that do not go together."""
    chosen = [load.request_rate is not None, load.concurrency is not None, bool(workload.trace)]
    if sum(chosen) != 1:
        raise BadParameter("choose one of --request-rate, --concurrency and --trace")
    if (workload.turns > 1 or server.chat) and workload.prompts == "ids":
        raise BadParameter("chats and --turns need text; --prompts ids sends none")
    if workload.trace and workload.turns > 1:
        raise BadParameter("a trace has no --turns")


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


def _schedule(load: LoadFlags, num_sessions: int | None) -> "Schedule":
    from quire.bench.run import Schedule

    return Schedule(
        load.request_rate,
        load.concurrency,
        num_sessions,
        load.duration,
        load.ramp,
        load.warmup,
        load.seed,
    )


def _sessions(
    flags: WorkloadFlags, load: LoadFlags
) -> tuple[Callable[[bool], "Iterator[Session]"], int | None]:
    """Returns a function of whether it is the warm-up, whose sessions are others, and the number of
    sessions to run."""
    from quire.bench.prompts import COMMON_WORDS, Prompts, single_token_words
    from quire.bench.workload import Shape, block_drawer, read_trace, synthetic, trace

    words = single_token_words(flags.tokenizer) if flags.tokenizer else COMMON_WORDS
    chosen = None if flags.prompts == "ids" else words
    shape = Shape(
        flags.prompt_len,
        flags.output_len,
        flags.spread,
        flags.prefix_len,
        flags.num_prefixes,
        flags.turns,
    )

    def drawn(is_warmup: bool) -> "Iterator[Session]":
        seed = load.seed + (1 << 32) * is_warmup
        return synthetic(Prompts(seed, chosen, flags.vocab_size), shape)

    if flags.trace is None:
        default = 100 if load.duration is None else None
        return drawn, load.num_requests or default
    draw_block = block_drawer(chosen, flags.vocab_size, load.seed)
    lines = read_trace(flags.trace, load.num_requests)
    recorded = trace(lines, flags.trace_speed, flags.trace_scale, draw_block)
    return lambda is_warmup: drawn(True) if is_warmup else iter(recorded), len(recorded)


async def _run(
    gateway: GatewayFlags,
    server: ServerFlags,
    sessions: Callable[[bool], "Iterator[Session]"],
    schedule: "Schedule",
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
            schedule,
            as_chat=server.chat or config["turns"] > 1,
            slo_ms=slo_ms,
            config=config | {"model": model},
            progress=live,
        )
    finally:
        await target.close()


async def _target(gateway: GatewayFlags, server: ServerFlags) -> "tuple[Target, str]":
    """The server, and the name of the model."""
    from quire.bench.target import GrpcTarget, HttpTarget

    if server.url is None:
        sampling = Sampling(temperature=server.temperature, ignore_eos=server.ignore_eos)
        grpc = GrpcTarget(gateway.address, server.model, sampling, server.timeout)
        return grpc, server.model or "default model"
    fields = {"temperature": server.temperature} | json.loads(server.extra_body)
    if server.ignore_eos:
        fields |= {"ignore_eos": True}
    http = partial(
        HttpTarget, server.url, api_key=server.api_key, timeout_s=server.timeout, fields=fields
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


def _report(result: "Result", flags: ResultFlags) -> None:
    from quire.bench.report import html
    from quire.cli.bench_live import print_report

    if flags.html:
        flags.html.write_text(html(result.as_json(), result.records))
    if flags.json_file:
        requests = [record.as_json() for record in result.records]
        flags.json_file.write_text(json.dumps(result.as_json() | {"requests": requests}))
    if flags.json:
        print(json.dumps(result.as_json()))
    else:
        print_report(result.summary)
