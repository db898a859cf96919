"""Weights of a checkpoint: read, fused, packed."""
