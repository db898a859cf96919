"""Answers operators: listings, audits, drains, block maps."""
