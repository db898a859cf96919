"""`quire generate`: sends one prompt and prints the answer as it arrives."""

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from typer import Argument, BadParameter, Option

from quire.cli.flags import GatewayFlags, Json
from quire.cli.output import print_json
from quire.cli.requests.interrupt import ctrl_c_cancels
from quire.cli.requests.samples import Samples, delta_text, logprob_lines
from quire.cli.requests.sampling import SamplingFlags, SeveralFlags
from quire.errors import InvalidRequest
from quire.messages import Request, usage_of
from quire.types import ChatMessage, Prompt, Sampling

_MAX_TOKENS = 1024
"""The most tokens of an answer without --max-tokens: a small model may ramble to the end of its
context, and a terminal has nobody who reads that far."""


@dataclass(frozen=True)
class RequestFlags:
    """The rest of a request, besides its prompt and sampling."""

    model: Annotated[str, Option(metavar="NAME", help="needed if several models are served")] = ""
    priority: Annotated[
        int,
        Option(
            metavar="N",
            help="lower is served first; refused unless the gateway has --client-priority",
        ),
    ] = 0
    cache_salt: Annotated[
        str, Option(metavar="SALT", help="share cached prefixes only within this salt")
    ] = ""
    request_id: Annotated[str, Option(metavar="ID", help="default: a random id")] = ""
    timeout: Annotated[float | None, Option(metavar="S", help="the request's deadline")] = None

    def request(self, prompt: Prompt, sampling: Sampling) -> Request:
        return Request(
            prompt, sampling, self.model, self.request_id, self.priority, self.cache_salt
        )


def generate(
    text: Annotated[str, Argument(help="the prompt; - reads it from standard input")],
    gateway: GatewayFlags,
    asked: RequestFlags,
    sampling: SamplingFlags,
    several: SeveralFlags,
    chat: Annotated[
        bool,
        Option(
            "--chat",
            help="send the text as a user's message through the model's chat template (the "
            "default)",
        ),
    ] = False,
    raw: Annotated[
        bool, Option("--raw", help="send the text as it is; the model continues it")
    ] = False,
    system: Annotated[
        str | None, Option(metavar="TEXT", help="a system message before the user's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a prompt and stream the answer.

    Without --max-tokens, the answer has at most 1,024 tokens.
    """
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=_MAX_TOKENS)
    if chat and raw:
        raise BadParameter("--chat and --raw exclude each other")
    request = asked.request(_prompt(text, system, raw), sampling.sampling(**several.fields()))
    samples = Samples(several.n, delta_text if several.logprobs is None else logprob_lines)
    show = print_json if as_json else samples.show
    delta = None
    with gateway.connect() as client:
        try:
            with ctrl_c_cancels(lambda: client.send(request, asked.timeout)) as stream:
                for delta in stream:
                    show(delta)
        except InvalidRequest as error:
            if raw or "chat template" not in str(error):
                raise
            raise InvalidRequest(f"{error}; --raw sends the text as it is", error.code) from error
    usage = usage_of(delta)
    if not as_json and sys.stderr.isatty():
        samples.show_usage(usage)


def _prompt(text: str, system: str | None, is_raw: bool) -> Prompt:
    text = sys.stdin.read() if text == "-" else text
    if is_raw:
        if system is not None:
            raise InvalidRequest("--system needs a chat; --raw sends no messages", "usage")
        return text
    head = [ChatMessage("system", system)] if system is not None else []
    return [*head, ChatMessage("user", text)]
