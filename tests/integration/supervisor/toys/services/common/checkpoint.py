"""Every checkpoint will do for the toys."""
