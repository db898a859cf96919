"""Keeps blocks that prompts ask for again in files, a tier below the pool."""
