"""The middleware that every request passes first: bounds of bodies, API keys, pages of other
sites."""
