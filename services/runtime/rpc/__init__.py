"""The gRPC parts that all services share: server, channel, errors, proofs, batching."""
