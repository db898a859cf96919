"""The memory of a runner on its device: the inputs of a step, and the tokens that it draws."""
