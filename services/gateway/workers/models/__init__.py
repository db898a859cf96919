"""The gateway's knowledge of the models that it serves."""
