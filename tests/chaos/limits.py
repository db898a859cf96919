"""The longest times that anything may take under chaos. Anything slower is a violation."""

UNDISTURBED_S = 60.0
"""A request before the first fault."""

SILENCE_S = 60.0
"""The time between two messages of a stream."""

RECOVERY_S = 60.0
"""The time until a process has returned and is healthy."""

UPGRADE_S = 300.0
"""The time in which an upgrade replaces every process."""

AUDIT_S = 60.0
"""The time until an audit of the whole ledger is answered and clean."""

RELEASE_S = 60.0
"""The time until all blocks are released once no request runs."""

LAST_STREAMS_S = 120.0
"""The time for the running streams once the faults have ended."""

DESCRIPTION = (
    f"a stream is silent for {SILENCE_S:g} s at most, "
    f"a process is healthy within {RECOVERY_S:g} s of a fault, "
    f"an audit is clean within {AUDIT_S:g} s of it, "
    f"no block is held {RELEASE_S:g} s after the last stream"
)
