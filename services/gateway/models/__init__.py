"""What the gateway knows of the models that it serves."""
