"""Services that start at once and do nothing but stand where the real ones would."""
