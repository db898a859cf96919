"""Whether this worker may still write: registration, fencing, joining again, stuck steps."""
