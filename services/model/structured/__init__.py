"""Structured output: forms of texts, and the tokens that they allow next."""
