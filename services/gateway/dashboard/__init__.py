"""The dashboard: one page at `/` of the HTTP port, and the feed of updates that it shows."""
