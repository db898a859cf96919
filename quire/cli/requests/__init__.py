"""The commands that send requests."""
