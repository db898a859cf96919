"""The NUMA nodes of this host, and where memory is placed."""
