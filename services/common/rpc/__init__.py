"""gRPC as every service uses it."""
