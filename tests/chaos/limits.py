"""How long things may take under torment. What takes longer is a fault."""

ALONE_S = 60.0
"""A request, before anything happens."""

SILENCE_S = 60.0
"""From one message of a stream to the next: longer, and it hangs."""

BACK_S = 60.0
"""A process, until it is back and well."""

AUDIT_S = 60.0
"""An audit of the whole ledger, until it is answered and clean."""

EMPTY_S = 60.0
"""Blocks, until they are let go of once nobody asks for anything."""

END_S = 120.0
"""The streams that are under way when the events end."""

TOLD = (
    f"a stream is silent for {SILENCE_S:g} s at most, a process is back within {BACK_S:g} s, an "
    f"audit clean within {AUDIT_S:g} s of its event, nothing held {EMPTY_S:g} s after the last "
    "stream"
)
