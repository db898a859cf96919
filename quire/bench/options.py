"""The options of `quire bench`. A field is a flag."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from quire.addresses import http_url

_server = partial(Option, rich_help_panel="Server", show_default=False)
_load = partial(Option, rich_help_panel="Load", show_default=False)
_work = partial(Option, rich_help_panel="Workload")
_result = partial(Option, rich_help_panel="Results", show_default=False)


@dataclass(frozen=True)
class ServerOptions:
    """The server and its API. Without --url: Quire's gateway at --address, over gRPC."""

    url: Annotated[
        str | None,
        _server(
            metavar="URL",
            parser=http_url,
            help="an OpenAI-compatible server, such as http://host:8000",
        ),
    ] = None
    model: Annotated[
        str, _server(metavar="NAME", help="default: the first one that the server lists")
    ] = ""
    chat: Annotated[
        bool, _server("--chat", help="send messages through the chat template; default: text")
    ] = False
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
class LoadOptions:
    """When sessions are sent: at random, or several at a time. The number of sessions or the
    duration ends the load, whichever is reached first."""

    request_rate: Annotated[
        float | None,
        _load(metavar="R", min=1e-6, help="open loop: R sessions a second, at random (Poisson)"),
    ] = None
    concurrency: Annotated[
        int | None, _load(metavar="N", min=1, help="closed loop: N sessions at a time")
    ] = None
    num_requests: Annotated[
        int | None,
        _load(metavar="N", min=1, help="number of sessions; default: 100"),
    ] = None
    duration: Annotated[
        float | None,
        _load(metavar="S", min=0.001, help="end after S seconds, and cut off what still runs"),
    ] = None
    ramp: Annotated[
        float, _load(metavar="S", min=0, help="raise rate or concurrency over S seconds")
    ] = 0.0
    warmup: Annotated[
        int, _load(metavar="N", min=0, help="requests before, which do not count; default: 2")
    ] = 2
    seed: Annotated[int, _load(metavar="N", help="of prompts and times; default: 0")] = 0


@dataclass(frozen=True)
class WorkloadOptions:
    """The requests. Lengths are in tokens. Sessions take the shared prefixes in turn."""

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
class ResultOptions:
    """Outputs for the figures, and limits on them."""

    goodput: Annotated[
        list[str] | None,
        _result(
            metavar="NAME:MS",
            help="count requests within these limits: ttft, tpot, e2e; such as ttft:500 tpot:50",
        ),
    ] = None
    json_file: Annotated[
        Path | None, _result(metavar="FILE", help="write the figures and every request")
    ] = None
    json: Annotated[bool, _result("--json", help="print JSON for scripts")] = False
