"""Reads and checks a checkpoint's directory, without PyTorch."""
