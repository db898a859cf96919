"""The addresses at which clients reach gateways."""

from urllib.parse import urlsplit

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""The gRPC address of a gateway where none is named."""


def http_url(text: str) -> str:
    """Return `text` if it is the URL of an HTTP server. Raises ValueError if it is not."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no URL, such as http://127.0.0.1:8000")
    return text
