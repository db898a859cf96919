"""Paths, tests, settings, metrics and commands in the documents exist."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from quire.cli.app import app
from tools import settings_page

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TREES = "advisor|blockstore|bench|deploy|docs|kernels|proto|quire|services|tests|tools"


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_paths_exist(document: Path) -> None:
    """Every path in backquotes that begins with one of the project's directories; `::name` is a
    test or another definition in the file."""
    found = re.findall(rf"`((?:{TREES})/[\w./*-]*)(?:::(\w+))?`", document.read_text())
    for path, definition in found:
        matches = list(ROOT.glob(path)) if "*" in path else [ROOT / path]
        assert matches, path
        assert all(match.exists() for match in matches), path
        assert not definition or definition in _definitions(ROOT / path), f"{path}::{definition}"


@cache
def _definitions(path: Path) -> frozenset[str]:
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in tree if isinstance(node, definitions))


def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link names an existing file and, after `#`, a heading of that file."""
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_are_understood(document: Path) -> None:
    """Every `quire ...` in a shell block, and every complete one in backquotes."""
    text = document.read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    commands = re.findall(r"^(?:\.venv/bin/)?quire (.*)$", blocks, re.MULTILINE)
    commands += re.findall(r"`quire ((?!--)[^`]*)`", text)
    for command in commands:
        words = shlex.split(command, comments=True)
        if "--help" not in words:
            _parse(words)


def _parse(words: list[str]) -> None:
    """Parse a command line of `quire` without running it. Raises TyperException."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("quire", words)
    while hasattr(command, "resolve_command") and context._protected_args + context.args:
        name, command, words = command.resolve_command(
            context, context._protected_args + context.args
        )
        context = command.make_context(name, words, parent=context)


def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b(?=`|\s+#|$)", document.read_text())) <= targets


def test_the_page_of_settings_is_generated() -> None:
    """`python -m tools.settings_page` writes its tables from the settings of the services."""
    assert settings_page.PAGE.read_text() == settings_page.page()


def test_every_metric_is_documented() -> None:
    code = (ROOT / "services" / "runtime" / "metrics.py").read_text()
    documented = (ROOT / "docs" / "operations" / "observing.md").read_text()
    assert set(re.findall(r"`(quire:\w+)`", documented)) == set(re.findall(r'"(quire:\w+)"', code))


def test_every_law_has_a_test_or_says_that_it_has_none() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    laws = re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in laws] == list(range(1, 11))
    for number, section in laws:
        assert re.search(r"`tests/[\w/]+\.py|not yet tested", section), f"law {number}"


def test_every_decision_is_in_the_index_with_its_title() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    rows = re.findall(
        r"^\| \[(\d+)\]\((\S+)\) \| (.+?) \| (\d{4}-\d\d-\d\d) \|$",
        (ROOT / "docs" / "adr" / "README.md").read_text(),
        re.MULTILINE,
    )
    listed = [(file, f"# {number}. {title}") for number, file, title, _ in rows]
    assert listed == [(record.name, record.read_text().partition("\n")[0]) for record in records]
    assert len(records) <= 25, "a decision that surprises nobody is on the page of its subject"


def test_decisions_that_code_and_documents_cite_exist() -> None:
    numbers = {int(record.name[:4]) for record in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    sources = [
        path
        for tree in TREES.split("|")
        for path in (ROOT / tree).rglob("*")
        if path.suffix in {".py", ".lua", ".cpp", ".h", ".proto", ".md", ".sh", ".yml"}
    ]
    for source in [ROOT / "README.md", *sources]:
        cited = {int(number) for number in re.findall(r"\bADR\s(\d+)", source.read_text())}
        assert cited <= numbers, source
