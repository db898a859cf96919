"""The loads of `bench.compare` on servers that it starts."""
