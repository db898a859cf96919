"""Whether this worker may still write: registration, heartbeats, fences, rejoining, stuck steps."""
