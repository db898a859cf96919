"""The bodies of requests: how they are read, and which fields they may have."""
