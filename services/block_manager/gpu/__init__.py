"""The keeper of GPU memory, and the processes that use it."""
