"""Turns tokens into the text and logprobs that a client reads, and bounds what it leaves unread."""
