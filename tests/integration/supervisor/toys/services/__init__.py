"""Toy services that start at once and do nothing, in the places of the real ones."""
