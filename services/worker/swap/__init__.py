"""The swap pool: KV of preempted requests, copied out and back."""
