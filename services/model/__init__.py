"""What a checkpoint says: its config, tokenizer, chat template and weights on disk. No PyTorch."""
