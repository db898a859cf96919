"""Speculative decoding: drafts of a sequence's next tokens, verified by the step that draws them.

See ADR 159.
"""
