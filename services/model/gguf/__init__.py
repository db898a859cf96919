"""Reads GGUF files, the checkpoint format of llama.cpp, without PyTorch and NumPy."""
