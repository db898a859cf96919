"""The weights of a checkpoint: loading, fusing, packing."""
