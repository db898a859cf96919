"""Reads checkpoints: config, tokenizer, chat template and weights on disk, without PyTorch."""
