"""A simulated cluster of 1,000 workers on a public trace, and a real Redis of its size."""
