"""The commands that run a deployment."""
