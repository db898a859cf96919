"""Hides the passwords in a URL, for error texts and logs."""

import re
from urllib.parse import unquote


def without_password(url: str) -> str:
    """The URL with `***` instead of its password, and of each password in its query: redis-py
    accepts its own password and the password of a TLS key there.

    A URL that is not valid, such as one with a `/` in its password, shows no password either.
    """
    url = re.sub(r"(?<=[?&])([^=&]*)=[^&]*", _hide_value, url)
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)


def _hide_value(field: re.Match[str]) -> str:
    return f"{field[1]}=***" if "password" in unquote(field[1]).lower() else field[0]
