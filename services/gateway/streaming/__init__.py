"""From tokens to what a client reads: text, logprobs, pacing, backpressure."""
