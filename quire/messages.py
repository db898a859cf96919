"""Translates the dataclasses of `quire.types` to protobuf and back."""

import json
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from google.protobuf.message import Message

from quire.errors import InvalidRequest, ServerError
from quire.reports import Worker, WorkerState
from quire.types import (
    Beam,
    Candidate,
    ChatMessage,
    Choice,
    Completion,
    Delta,
    Embedding,
    FinishReason,
    Prompt,
    RequestMetrics,
    Retain,
    RetainAnswer,
    Sampling,
    StructuredOutput,
    TokenLogprobs,
    Usage,
)
from quire.v1 import block_manager_pb2, inference_pb2, logprobs_pb2, sampling_pb2
from quire.worker_names import worker_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

_FINISH_REASONS: dict[int, FinishReason] = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}
_NUM_SEEDS = 1 << 64
_WORKER_STATES: dict[int, WorkerState] = {
    block_manager_pb2.WORKER_STATE_STARTING: "starting",
    block_manager_pb2.WORKER_STATE_SERVING: "serving",
    block_manager_pb2.WORKER_STATE_DRAINING: "draining",
    block_manager_pb2.WORKER_STATE_FENCED: "fenced",
}
_LOAD = (
    *("num_running", "num_waiting", "num_free_slots", "num_pending_tokens"),
    *("busy_permille", "step_us", "tokens_per_s"),
)
"""The fields of a worker that its message has in `load`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, except for its time limit."""

    prompt: Prompt
    sampling: Sampling = field(default=Sampling())
    model: str = ""
    """May be empty if the gateway serves only one model."""
    request_id: str = ""
    """If it is empty, the client library draws one."""
    priority: int = 0
    """A lower one is served first; without --client-priority a gateway refuses all but 0."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    include_metrics: bool = False
    """Ask for the figures of the request (`Usage.metrics`)."""
    retain: Sequence[Retain] = ()
    """Ask to keep prefixes of the prompt in the cache (`Usage.retained`)."""


def generate_request(request: Request) -> inference_pb2.GenerateRequest:
    """Return the request as protobuf. Raises InvalidRequest if a value does not fit into its field,
    such as a negative token id."""
    try:
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            sampling=_sampling(request.sampling),
            priority=request.priority,
            cache_salt=request.cache_salt,
            include_metrics=request.include_metrics,
            retain=[inference_pb2.Retain(**asdict(each)) for each in request.retain],
        )
        _set_prompt(message, request.prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}", "invalid_request") from error
    return message


def embed_request(
    prompt: str | Sequence[int], dimensions: int | None = None, model: str = ""
) -> inference_pb2.EmbedRequest:
    """Raises InvalidRequest if a value does not fit into its field."""
    try:
        message = inference_pb2.EmbedRequest(model=model, dimensions=dimensions)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}", "invalid_request") from error
    return message


def embedding(response: inference_pb2.EmbedResponse) -> Embedding:
    return Embedding(tuple(response.embedding), response.usage.num_prompt_tokens)


def _sampling(sampling: Sampling) -> sampling_pb2.SamplingParams:
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty: no token could come")
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    values["beam"] = None if sampling.beam is None else _beam(sampling.beam)
    if sampling.seed is not None and -(_NUM_SEEDS // 2) <= sampling.seed < 0:
        values["seed"] = sampling.seed + _NUM_SEEDS
    asked = values.pop("structured_outputs")
    values["structured_output"] = None if asked is None else _structured_output(asked)
    message = sampling_pb2.SamplingParams()
    for name, value in values.items():
        try:
            message.MergeFrom(sampling_pb2.SamplingParams(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} is {value!r}: {error}") from error
    return message


def _structured_output(asked: StructuredOutput) -> sampling_pb2.StructuredOutput:
    given = [
        (f.name, value) for f in fields(asked) if (value := getattr(asked, f.name)) is not None
    ]
    if len(given) != 1:
        raise ValueError(f"structured_outputs has {len(given)} of its fields, not exactly one")
    (name, value), *_ = given
    if name == "json_object":
        if value is not True:
            raise ValueError("json_object is True or None")
        return sampling_pb2.StructuredOutput(kind=sampling_pb2.STRUCTURE_KIND_JSON)
    text = value if isinstance(value, str) else json.dumps(value)
    return sampling_pb2.StructuredOutput(kind=f"STRUCTURE_KIND_{name.upper()}", text=text)


def _beam(beam: Beam) -> sampling_pb2.BeamSearch:
    if beam.early_stopping not in (False, True, "never"):
        raise ValueError(f"early_stopping is {beam.early_stopping!r}, not True, False or 'never'")
    return sampling_pb2.BeamSearch(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=f"EARLY_STOPPING_{beam.early_stopping}".upper(),
    )


def _set_prompt(message: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and all(isinstance(item, ChatMessage) for item in prompt):
        chat = cast("list[ChatMessage]", prompt)
        message.chat.messages.extend(
            inference_pb2.ChatMessage(role=item.role, content=item.content, name=item.name)
            for item in chat
        )
    else:
        strange = next((item for item in prompt if not hasattr(item, "__index__")), None)
        if strange is not None:
            raise TypeError(
                f"the prompt is a list with a {type(strange).__name__} in it; a request has one "
                "prompt: a text, a list of token ids, or a list of ChatMessage"
            )
        # An empty list is sent too: the server refuses it with a precise error.
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(cast("list[int]", prompt))


def deltas(response: inference_pb2.GenerateResponse) -> Iterator[Delta]:
    """The deltas of a response. The first one carries the prompt logprobs, the last one the
    usage."""
    usage = _usage(response.usage) if response.HasField("usage") else None
    for number, delta in enumerate(response.deltas, start=1):
        of_prompt = response.prompt_logprobs if number == 1 else ()
        yield Delta(
            request_id=response.request_id,
            index=delta.index,
            token_ids=tuple(delta.token_ids),
            text=delta.text,
            finish_reason=_FINISH_REASONS.get(delta.finish_reason),
            stopped_by=_stopped_by(delta),
            usage=usage if number == len(response.deltas) else None,
            logprobs=tuple(map(_token_logprobs, delta.logprobs)),
            prompt_logprobs=tuple(map(_token_logprobs, of_prompt)),
            score=delta.score if delta.HasField("score") else None,
        )


def _token_logprobs(message: logprobs_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_candidate(message.chosen), tuple(map(_candidate, message.top)))


def _candidate(message: logprobs_pb2.Candidate) -> Candidate:
    return Candidate(message.token_id, message.logprob, message.rank, message.token)


def _stopped_by(delta: inference_pb2.SequenceDelta) -> str | int | None:
    kind: Literal["stop_string", "stop_token_id"] | None = delta.WhichOneof("stopped_by")
    return getattr(delta, kind) if kind else None


def _usage(usage: inference_pb2.Usage) -> Usage:
    metrics = from_message(RequestMetrics, usage.metrics) if usage.HasField("metrics") else None
    return from_message(
        Usage, usage, metrics=metrics, retained=each(RetainAnswer, "retained")(usage)
    )


def explain_request(about: str | Request) -> inference_pb2.ExplainRequest:
    """Ask about a request by its id, or about one that is not sent."""
    if isinstance(about, str):
        return inference_pb2.ExplainRequest(request_id=about)
    return inference_pb2.ExplainRequest(forecast=generate_request(about))


def usage_of(last: Delta | None) -> Usage:
    """Return the usage in the last delta of a request. Raises ServerError if it has none, because
    the stream ended before the request did."""
    if last is None or last.usage is None:
        raise ServerError("the stream ended before the request did", "internal")
    return last.usage


def completion(deltas: Sequence[Delta]) -> Completion:
    """Joins all deltas of a request. Raises ServerError if the stream ended before the request
    did."""
    usage = usage_of(deltas[-1] if deltas else None)
    indices = sorted({delta.index for delta in deltas})
    choices = tuple(_choice([d for d in deltas if d.index == index]) for index in indices)
    return Completion(deltas[-1].request_id, choices, usage, deltas[0].prompt_logprobs)


def _choice(deltas: Sequence[Delta]) -> Choice:
    """Joins the deltas of one sequence."""
    last = deltas[-1]
    if last.finish_reason is None:
        raise ServerError("a sequence ended without a finish reason", "internal")
    return Choice(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        stopped_by=last.stopped_by,
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        score=last.score,
    )


def workers(response: block_manager_pb2.ListWorkersResponse) -> tuple[Worker, ...]:
    return tuple(
        from_message(
            Worker,
            worker,
            name=worker_name(worker.worker_id),
            state=_WORKER_STATES.get(worker.state, "unknown"),
            **{name: getattr(worker.load, name) for name in _LOAD},
        )
        for worker in response.workers
    )


def each(cls: type[D], name: str) -> Callable[[Any], tuple[D, ...]]:
    """Return a function that reads the field `name` of a response, which has several messages."""
    return lambda response: tuple(from_message(cls, one) for one in getattr(response, name))


def from_message(cls: type[D], message: Message, **converted: object) -> D:
    """A dataclass with the fields of the same name in `message`, and the `converted` fields, which
    have another name or type there. An `optional` field that is absent becomes None."""
    names = {field.name for field in fields(cls)} - converted.keys()
    values = {name: getattr(message, name) for name in names}
    for name, value in values.items():
        if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
            values[name] = None
        if isinstance(value, MutableMapping):
            values[name] = dict(value)
        elif isinstance(value, MutableSequence):
            values[name] = tuple(value)
    return cls(**values, **converted)
