"""The middleware that every request passes first: allowed hosts, API keys, memory for bodies."""
