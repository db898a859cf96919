"""What is in a checkpoint's directory, read without PyTorch."""
