"""What a request is called: its client's id together with a resume token that nobody else knows.

The gateway and the workers know a request under the id and a digest of the token. Another client
that uses the same id therefore has another request, and cannot find out whether this one is there.
"""

import base64
import hashlib
import secrets
from dataclasses import replace

from services.gateway.frontend.api import GenerationRequest
from services.gateway.intake.checks import check_text, require

MAX_ID_CHARS = 256
_MIN_TOKEN_CHARS = 22
"""128 bits in base64."""
_SEPARATOR = "~"
_DIGEST_BYTES = 16


def check_identity(request: GenerationRequest) -> None:
    """InvalidRequest."""
    check_text("request_id", request.request_id, MAX_ID_CHARS)
    check_text("resume_token", request.resume_token, MAX_ID_CHARS)
    num_chars = len(request.resume_token)
    require(
        not num_chars or num_chars >= _MIN_TOKEN_CHARS,
        f"resume_token has {num_chars} characters; it needs 128 random bits, at least "
        f"{_MIN_TOKEN_CHARS} characters",
    )
    require(
        request.received is None or bool(request.request_id and request.resume_token),
        "received needs the request_id and the resume_token of the stream that broke; the token "
        "came with its first response",
    )


def with_resume_token(request: GenerationRequest) -> GenerationRequest:
    """With a token drawn where a new request has none."""
    if request.resume_token or request.received is not None:
        return request
    return replace(request, resume_token=secrets.token_urlsafe(32))


def scoped_id(request_id: str, resume_token: str) -> str:
    """What gateway and workers call a request. They compare digests: the time that a comparison
    takes says nothing about the token, and neither does a log."""
    digest = hashlib.sha256(resume_token.encode()).digest()[:_DIGEST_BYTES]
    return request_id + _SEPARATOR + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def client_id(scoped: str) -> str:
    """What its client calls it."""
    return scoped.rpartition(_SEPARATOR)[0] or scoped
