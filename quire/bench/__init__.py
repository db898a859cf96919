"""`quire bench`: load on a server, and what its clients see (`docs/bench.md`)."""
