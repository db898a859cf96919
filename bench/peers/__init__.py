"""The engines that Quire is measured against, each in a virtual environment of its own."""
