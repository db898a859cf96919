"""Turns tokens into the text and logprobs that a client reads; stream pacing and backpressure."""
