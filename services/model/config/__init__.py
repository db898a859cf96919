"""Reads `config.json` into a checked configuration."""
