"""The commands that show the state of a deployment."""
