"""How much of reserved KV memory holds KV: `python -m bench.paging`."""
