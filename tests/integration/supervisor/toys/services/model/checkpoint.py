"""The toys accept every checkpoint."""
