"""Checks whether this worker may still write: registration, fencing, rejoining, stuck steps."""
