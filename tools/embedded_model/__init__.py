"""How the embedded model is made: a corpus in readable files, a tokenizer, a training loop."""
