"""The messages between services: each defined once."""
