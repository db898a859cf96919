"""The front doors: gRPC, HTTP and the relay of operations."""
