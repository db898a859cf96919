"""Structured output: forms of texts, and which tokens they allow next."""
