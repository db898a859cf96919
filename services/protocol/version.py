"""Versions that services compare when they meet."""

PROTOCOL_VERSION = 6
"""Of the messages in proto/quire/v1; raised when peers of the old one can no longer be talked
to."""
