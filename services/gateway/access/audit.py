"""The audit log of operations: a line for each call of an operator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from services.gateway.access.caller import EVERYONE, current_caller
from services.runtime.logging import get_logger
from services.runtime.rpc.error_table import code_of

log = get_logger(__name__)


@contextmanager
def audited(method: str, request: Message | Mapping[str, Any]) -> Iterator[None]:
    """Log an operation and its outcome: `ok`, the code of its error, or `cancelled`. Calls that
    change nothing, which dashboards and `quire scale --wait` make all the time, are logged at level
    debug."""
    outcome = "cancelled"
    try:
        yield
        outcome = "ok"
    except Exception as error:
        outcome = code_of(error)
        raise
    finally:
        if isinstance(request, Message):
            request = MessageToDict(request, preserving_proto_field_name=True)
        only_reads = method.startswith("List") or (method == "Scale" and not _scales(request))
        write = log.debug if only_reads else log.info
        write(
            "operation_performed",
            operator=current_caller(EVERYONE).key.lstrip("~") or "anybody",
            method=method,
            target=request,
            outcome=outcome,
        )


def _scales(request: Mapping[str, Any]) -> bool:
    """Whether a request of Scale changes the number of workers, and does not only ask for it."""
    return "num_prefill" in request or "num_decode" in request
