"""Sequences, sequence groups and beam searches in the engine."""
