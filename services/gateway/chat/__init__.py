"""Turns a received request into an admitted one: checks, defaults, token ids."""
