"""Queues, and where and when a request goes to which worker."""
