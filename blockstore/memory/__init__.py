"""The ledger of a pool in plain Python; a `MemoryStore` keeps one for each pool."""
