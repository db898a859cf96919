"""Attention on a GPU by other libraries, and the choice among them and `kvops.triton`."""
