"""Turns tokens into the text and logprobs that a client reads; backpressure, and rests."""
