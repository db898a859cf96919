"""Sequences and groups of sequences while an engine has them."""
