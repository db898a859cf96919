"""The source of the functions."""

import re
from pathlib import Path

import pytest

from blockstore.errors import BY_CODE
from blockstore.redis.library import FUNCTIONS, library_text

FILES = sorted(FUNCTIONS.glob("*.lua"))


def test_every_error_code_of_the_functions_has_its_exception_and_back() -> None:
    """Codes are refused by name, or are the error of one growth, or are chosen by name."""
    used = set(re.findall(r"'([A-Z]+(?:_[A-Z]+)*)'[ ,]", _code(library_text())))
    codes = used & (BY_CODE.keys() | set(re.findall(r"refuse\('(\w+)'", library_text())))
    assert codes == BY_CODE.keys()


def test_the_contract_at_the_head_names_every_function() -> None:
    for file in FILES:
        head = file.read_text().split("\n\n", 1)[0]
        for name in re.findall(r"^define\('(\w+)'", file.read_text(), flags=re.MULTILINE):
            assert re.search(rf"^-- {name}\b", head, flags=re.MULTILINE), f"{file.name}: {name}"


def test_every_key_stands_in_the_table_of_keys() -> None:
    text = library_text()
    table = (FUNCTIONS / "10_keys.lua").read_text().split("\nlocal ", 1)[0]
    for name in set(re.findall(r"tag \.\. ':(\w+)", text)):
        assert re.search(rf"T:{name}\b", table), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_functions_are_short_and_scan_nothing(file: Path) -> None:
    """A function has at most 40 lines, and no command whose time grows with the server's
    content."""
    lines = file.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    start = 0
    for number, line in enumerate(lines):
        if re.match(r"(local )?function |define\(|function ", line):
            start = number
        if line in ("end", "end)"):
            assert number - start < 40, f"{file.name}:{start + 1}"
    assert not re.search(r"'(KEYS|[HSZ]?SCAN|FLUSH\w+|SORT)'", file.read_text())


def _code(text: str) -> str:
    """The source without comments."""
    return re.sub(r"--.*", "", text)
