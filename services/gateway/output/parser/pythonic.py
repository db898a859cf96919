"""Calls that are written as in Python: `[f(x=1, y="two"), g()]`.

Their arguments become JSON, so each call is passed on as a whole, once it is complete.
"""

import ast
import json
import warnings
from collections.abc import Collection

from services.gateway.output.parser.json_calls import checked_name
from services.gateway.output.parser.parts import PartWriter
from services.gateway.output.parser.reader import Malformed, Reader, Reading

MAX_CALL_CHARS = 1 << 16
"""A longer call is content: to parse it would take the event loop too long."""


def read_list(reader: Reader, writer: PartWriter, offered: Collection[str]) -> Reading[None]:
    """Reads a list of calls. Malformed: as `read_calls`."""
    yield from reader.expect("[")
    yield from reader.skip_spaces()
    while True:
        name = checked_name((yield from reader.name()), offered)
        if (yield from reader.peek()) != "(":
            raise Malformed
        written: list[str] = []
        yield from reader.value(written.append, quotes="\"'")
        arguments = _as_json("".join(written))
        writer.start_call(name)
        writer.arguments(arguments)
        writer.end_call()
        reader.hold()
        if (yield from reader.ends_list()):
            return


def _as_json(arguments: str) -> str:
    """The arguments of a call, in their parentheses, as a JSON object."""
    if len(arguments) > MAX_CALL_CHARS:
        raise Malformed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # an escape that Python does not know
            call = ast.parse("f" + arguments, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if None in values:  # f(**...)
            raise Malformed
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode().decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error
