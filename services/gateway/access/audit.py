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
    change nothing, which dashboards, `quire scale --wait` and `quire upgrade` make all the time,
    are logged at level debug."""
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
        write = log.debug if _only_reads(method, request) else log.info
        write(
            "operation_performed",
            operator=current_caller(EVERYONE).key.lstrip("~") or "anybody",
            method=method,
            target=request,
            outcome=outcome,
        )


def _only_reads(method: str, request: Mapping[str, Any]) -> bool:
    """Whether the call asks for a state: a listing, how many workers there are, or how far an
    upgrade is."""
    match method:
        case "Scale":
            return not {"num_prefill", "num_decode"} & request.keys()
        case "Upgrade":
            return not request.get("begin")
        case _:
            return method.startswith("List")
