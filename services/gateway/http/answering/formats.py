"""The two formats of an answer: OpenAI's text completion and chat completion, both with vLLM's
`stop_reason` and `token_ids`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from quire.types import RetainAnswer, Usage
from services.gateway.http.answering.logprobs import JSON, chat_logprobs, text_logprobs
from services.gateway.output.delta import Delta, PositionLogprobs
from services.gateway.output.parser.parts import CallArguments, CallStart, Content, Part, Reasoning


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of one endpoint's answers."""

    id_prefix: str
    kind: str
    """The field `object` of an answer that is not streamed."""
    chunk_kind: str
    """The field `object` of each part of a stream."""
    opening: JSON | None
    """The fields of the choice with which a stream begins, if it begins with one."""
    deltas: Callable[[str, Sequence[Part] | None], list[JSON]]
    """The fields of a choice for the text of a delta and its parts: one for each part of the
    stream; none if nothing is new."""
    whole: Callable[[str, Sequence[Part] | None], JSON]
    """The fields of a choice for the whole text, and its parts."""
    logprobs: Callable[[Sequence[PositionLogprobs], int], JSON]
    """The field `logprobs` for tokens that begin at an offset of the choice's text."""
    prompt_logprobs_in_choice: bool
    """Whether prompt logprobs are in the choice; otherwise they are at the answer's top level."""


def _chat_deltas(text: str, parts: Sequence[Part] | None) -> list[JSON]:
    if parts is None:
        return [{"delta": {"content": text}}]
    return [{"delta": _delta_fields(part)} for part in parts]


def _chat_message(text: str, parts: Sequence[Part] | None) -> JSON:
    if parts is None:
        return {"message": {"role": "assistant", "content": text}}
    return {"message": _message_fields(parts)}


def _delta_fields(part: Part) -> JSON:
    """The field `delta` of a choice, for one part of its message."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message_fields(parts: Sequence[Part]) -> JSON:
    """The field `message` of a choice. Its content is null if it has none but calls."""
    content, reasoning = "", ""
    calls: list[JSON] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, call_id, name):
                calls.append(_call(call_id, name, ""))
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        **(_reasoning(reasoning) if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _reasoning(text: str) -> JSON:
    """Under both names: vLLM renamed `reasoning_content` to `reasoning`."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call_id: str, name: str, arguments: str) -> JSON:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


COMPLETION_FORMAT = AnswerFormat(
    id_prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    opening=None,
    deltas=lambda text, _parts: [{"text": text}],
    whole=lambda text, _parts: {"text": text},
    logprobs=text_logprobs,
    prompt_logprobs_in_choice=True,
)
CHAT_FORMAT = AnswerFormat(
    id_prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    deltas=_chat_deltas,
    whole=_chat_message,
    logprobs=lambda tokens, _offset: chat_logprobs(tokens),
    prompt_logprobs_in_choice=False,
)


def choice_json(
    index: int,
    content: JSON,
    delta: Delta | None,
    token_ids: list[int] | None,
    logprobs: JSON | None,
) -> JSON:
    """One choice of an answer. `token_ids` and `logprobs` are None if the client did not ask for
    them."""
    reason = delta.finish_reason.value if delta and delta.finish_reason else None
    if delta and delta.ends_with_calls:
        reason = "tool_calls"
    fields = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": delta.stopped_by if delta else None,
    }
    return fields if token_ids is None else {**fields, "token_ids": token_ids}


_OF_VLLM = (
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
    "tokens_per_second",
)


def metrics_json(usage: Usage | None) -> JSON:
    """The fields of an answer with the figures of its request: vLLM's `metrics`, and `quire`."""
    if usage is None or usage.metrics is None:
        return {}
    figures = asdict(usage.metrics)
    return {"metrics": {name: figures.pop(name) for name in _OF_VLLM}, "quire": figures}


def usage_json(usages: Iterable[Usage]) -> JSON:
    """The field `usage`: the sum over all prompts of an answer."""
    usages = tuple(usages)
    num_prompt = sum(usage.num_prompt_tokens for usage in usages)
    num_generated = sum(usage.num_generated_tokens for usage in usages)
    cached = [usage.num_cached_tokens for usage in usages if usage.num_cached_tokens is not None]
    num_accepted = sum(usage.num_accepted_drafts for usage in usages)
    num_rejected = sum(usage.num_rejected_drafts for usage in usages)
    written = [usage.num_written_tokens for usage in usages]
    details = {"cached_tokens": sum(cached), "cache_write_tokens": sum(filter(None, written))}
    retained = [retained_json(each) for usage in usages for each in usage.retained]
    drafts = {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_rejected,
    }
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": details if cached else None,
        "completion_tokens_details": drafts if num_accepted + num_rejected else None,
        **({"retained": retained} if retained else {}),
    }


def retained_json(answer: RetainAnswer) -> JSON:
    """The answer to a wish to retain a prefix."""
    return {
        "name": answer.name,
        "status": answer.status,
        "asked_tokens": answer.num_asked_tokens,
        "retained_tokens": answer.num_tokens,
        "ttl": answer.ttl_s,
        "reason": answer.reason or None,
    }
