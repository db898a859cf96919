"""Queues of waiting requests, and the choice of a worker for each request."""
