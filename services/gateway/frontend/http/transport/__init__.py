"""The server and its connections: timeouts, limits on sizes, and turns of the event loop."""
