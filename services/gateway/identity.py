"""The identity of a request: its client's id, scoped by a secret resume token and by the API key.

Gateway and workers identify a request by the client's id and a digest of the token and the key's
name. A second client that uses the same id therefore names another request, and cannot find out
whether the first one exists. That holds for another key even with a stolen token.
"""

import base64
import hashlib

from services.gateway.api import PromptRequest
from services.gateway.checks import check_text, require

MAX_ID_CHARS = 256
_MIN_TOKEN_CHARS = 22
"""128 bits in base64."""
_SEPARATOR = "~"
_DIGEST_BYTES = 16


def check_identity(request: PromptRequest) -> None:
    """Raises InvalidRequest if the id or the resume token is not usable."""
    check_text("request_id", request.request_id, MAX_ID_CHARS)
    # `quire top` and logs show it to operators, whose terminals obey control characters.
    require(
        request.request_id.isprintable(),
        "request_id has characters that cannot be printed",
        "request_id",
    )
    check_text("resume_token", request.resume_token, MAX_ID_CHARS)
    num_chars = len(request.resume_token)
    require(
        not num_chars or num_chars >= _MIN_TOKEN_CHARS,
        f"resume_token has {num_chars} characters; it needs 128 random bits, at least "
        f"{_MIN_TOKEN_CHARS} characters",
        "resume_token",
    )


def scoped_id(request_id: str, resume_token: str, key: str = "") -> str:
    """The request's id at gateway and workers. `key` is the name of the caller's API key.

    It has a digest of the token instead of the token. So neither a log nor the time that a
    comparison takes reveals the token.
    """
    scope = f"{key}\n{resume_token}" if key else resume_token
    digest = hashlib.sha256(scope.encode()).digest()[:_DIGEST_BYTES]
    return request_id + _SEPARATOR + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def client_id(scoped: str) -> str:
    """The client's part of a scoped id."""
    return scoped.rpartition(_SEPARATOR)[0] or scoped
