"""An engine in the caller's process, without a gateway, Redis and sockets."""
