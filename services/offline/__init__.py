"""Gateway, prefill worker and decode worker in one process, without Redis and without sockets."""
