"""The longest times that anything may take under chaos. Anything slower is a fault."""

ALONE_S = 60.0
"""A request before the first event."""

SILENCE_S = 60.0
"""The time between two messages of a stream."""

BACK_S = 60.0
"""The time until a process has returned and is well."""

AUDIT_S = 60.0
"""The time until an audit of the whole ledger is answered and clean."""

EMPTY_S = 60.0
"""The time until all blocks are released once no request runs."""

END_S = 120.0
"""The time for the running streams once the events have ended."""

TOLD = (
    f"a stream is silent for {SILENCE_S:g} s at most, a process is back within {BACK_S:g} s, an "
    f"audit clean within {AUDIT_S:g} s of its event, nothing held {EMPTY_S:g} s after the last "
    "stream"
)
