"""The gRPC services: generation, adapters, and the relay of operators' calls."""
