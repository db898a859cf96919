"""Log lines for people: `14:03:07 request ended: length, 6 prompt tokens, duration 33 ms`.

A key tells how its value is read, by the vocabulary of all logs: `num_blocks=512` is "512 blocks",
`duration_ms=32.9` is "duration 33 ms". The JSON of the same event has every key.
"""

from datetime import datetime

from structlog.types import EventDict, WrappedLogger

from quire.sizes import format_size
from quire.worker_names import worker_name

_HIDDEN = frozenset({"service", "level", "timestamp", "event", "exception", "exc_info", "stack"})
_SHOWN = {
    "service_starting": ("pid",),
    "model_loaded": ("model", "backend", "isa", "dtype", "quantize"),
    "place_chosen": ("num_cpus",),
    "cpus_divided": ("cpus", "borrowed"),
    "worker_ready": ("num_blocks", "address"),
    "request_ended": (
        *("outcome", "reason", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens"),
        *("num_accepted_drafts", "num_rejected_drafts", "num_preemptions", "num_moves"),
        *("time_to_first_token_ms", "duration_ms", "request_id", "trace_id"),
    ),
}
"""The keys of events that have more than a reader at a terminal needs, in their order; all other
events show all of their keys."""
_BARE = frozenset({"outcome", "reason", "model", "backend", "isa", "dtype", "address"})
"""Keys that their values make superfluous."""
_COLOURS = {"warning": "\033[33m", "error": "\033[31m", "critical": "\033[31m"}
_DIM, _PLAIN = "\033[2m", "\033[0m"


class LineRenderer:
    """Renders an event as one line, and its traceback below it. `has_time` is False if the reader
    adds the time, as the supervisor of `quire serve` does."""

    def __init__(self, *, has_time: bool, has_colours: bool) -> None:
        self._has_time = has_time
        self._has_colours = has_colours

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> str:
        name = str(event["event"])
        words = name if " " in name else name.replace("_", " ")
        if (level := str(event.get("level"))) in _COLOURS:
            words = self._painted(_COLOURS[level], f"{level}: {words}")
        keys = _SHOWN.get(name) or [key for key in event if key not in _HIDDEN]
        told = ", ".join(filter(None, (_told(key, event.get(key)) for key in keys)))
        line = f"{words}: {told}" if told else words
        if self._has_time:
            line = f"{self._painted(_DIM, f'{datetime.now():%H:%M:%S}')} {line}"
        return f"{line}\n{event['exception']}" if event.get("exception") else line

    def _painted(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._has_colours else text


def _told(key: str, value: object) -> str:
    """A key and its value in words; empty if the value says nothing."""
    if value is None or value in ("", "none") or (value == 0 and key.startswith("num_")):
        return ""
    if key == "worker_id":
        return worker_name(str(value))
    words, _, unit = key.replace("_", " ").rpartition(" ")
    if key.startswith("num_"):
        return f"{value:,} {key.removeprefix('num_').replace('_', ' ')}"
    if unit in ("ms", "s") and isinstance(value, int | float):
        return f"{words} {value:.3g} {unit}" if value < 100 else f"{words} {value:,.0f} {unit}"
    if unit == "bytes" and isinstance(value, int):
        return f"{words} {format_size(value)}"
    return str(value) if key in _BARE else f"{key.replace('_', ' ')} {value}"
