"""Opens the output of a request that was admitted."""

import asyncio

from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.identity import client_id
from services.gateway.output.logprob_text import PromptReporter
from services.gateway.output.output import Meter, Output, RequestStats
from services.gateway.output.parser.message import MessageParser
from services.gateway.output.rests import WriteRests
from services.gateway.output.sequence import OutputSequence
from services.gateway.request.request import Request
from services.gateway.workers.models.catalog import Model
from services.model.text.detokenizer import Detokenizer
from services.model.text.stop_strings import StopMatcher


def open_output(
    request: Request,
    model: Model,
    arrived_at: float,
    *,
    meter: Meter,
    rests: WriteRests | None,
    reports_cached: bool,
) -> None:
    """Open the output, with what the client has received; an embedding has no sequences.
    `arrived_at` is a time of the event loop's clock. With `reports_cached`, clients without a cache
    salt are told of cached prefixes, which other clients may have sent, too. (Tenants have a
    salt.)"""
    asked, prompt = request.asked, request.prompt_token_ids
    stats = RequestStats(len(prompt), arrived_at, reports_cached or bool(request.cache_salt))
    name, clock = client_id(request.id), asyncio.get_running_loop().time
    if not isinstance(asked, GenerationRequest):
        request.output = Output(name, stats, (), meter, clock)
        return
    received = asked.received or ()
    reports_prompt = asked.echo or request.prompt_logprobs is not None
    reports_prompt = reports_prompt and not any(each.token_ids for each in received)
    shown = asked.prompt if asked.truncation is None else prompt
    reporter = PromptReporter(shown, prompt, model.tokenizer) if reports_prompt else None
    sampling = asked.sampling
    sequences = [_sequence(index, request, sampling, model) for index in range(sampling.n)]
    output = request.output = Output(name, stats, sequences, meter, clock, reporter, rests)
    output.running_usage = asked.running_usage
    output.replay(received)


def _sequence(
    index: int, request: Request, asked: RequestedSampling, model: Model
) -> OutputSequence:
    sampling, parsing = request.sampling, request.parsing
    skips = asked.skip_special_tokens
    detokenizer = model.tokenizer.detokenizer(skip_special_tokens=skips)
    if parsing is not None and skips:
        detokenizer = Detokenizer(model.message_pieces)
    return OutputSequence(
        index,
        detokenizer,
        StopMatcher(asked.stop, included=asked.include_stop_str_in_output),
        frozenset(sampling.stop_token_ids),
        None if sampling.logprobs is None else model.tokenizer,
        MessageParser(parsing, f"{request.id}/{index}") if parsing else None,
        min_tokens=sampling.min_tokens,
    )
