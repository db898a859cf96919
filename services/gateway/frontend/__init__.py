"""The gateway's servers: gRPC, HTTP, and the relay of operators' calls."""
