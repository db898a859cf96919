"""The model of the chaos tests: random weights, because a real model decodes too slowly for nine
workers on two cores."""

from pathlib import Path

from bench.make_checkpoint import CheckpointSpec, make_checkpoint

_SPEC = CheckpointSpec(
    num_layers=6,
    hidden_size=256,
    head_dim=64,
    intermediate_size=768,
    vocab_size=2560,
    dtype="bfloat16",
)


def chaos_model(directory: Path) -> Path:
    """Writes the checkpoint into this directory."""
    return make_checkpoint(directory / "model", _SPEC)
