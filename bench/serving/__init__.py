"""Load on a server, and what its clients see: `bench/serve.py` is the command."""
