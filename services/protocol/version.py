"""The protocol version, which services compare when they connect."""

PROTOCOL_VERSION = 9
"""The version of the messages in proto/quire/v1. A change with which services of the old version
cannot work increments it."""
