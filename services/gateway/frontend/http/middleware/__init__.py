"""The middleware that every request passes first: allowed hosts, API keys, pages of other
sites, memory for bodies."""
