"""The gateway's worker directory, and its connections to workers."""
