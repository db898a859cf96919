"""The ledger of a pool in plain Python: what `MemoryStore` keeps for each pool."""
