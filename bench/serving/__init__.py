"""The loads of `bench.compare` on servers that it starts, by the generator of `quire bench`."""
