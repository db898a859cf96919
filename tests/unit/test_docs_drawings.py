"""The sequence diagrams of the documentation, drawn when the site is built."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pymdownx.superfences import SuperFencesException  # type: ignore[import-untyped]

from tools.sequence_drawings import sequence_html

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = {
    f"{page.relative_to(DOCS)}-{number}": source
    for page in sorted(DOCS.rglob("*.md"))
    for number, source in enumerate(
        re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
}


@pytest.mark.parametrize("name", SOURCES)
def test_drawings_need_no_script_and_say_all(name: str) -> None:
    """Each statement's text is there, within the drawing."""
    html = sequence_html(SOURCES[name])
    assert "http" not in html
    assert "<script" not in html
    drawing = ElementTree.fromstring(html)
    told = [" ".join(part for part in text.itertext()) for text in drawing.iter("text")]
    for line in SOURCES[name].splitlines():
        statement, colon, text = line.strip().partition(": ")
        assert not colon or text in told, statement
    (svg,) = drawing.iter("svg")
    *_, width, height = map(float, svg.attrib["viewBox"].split())
    for place in drawing.iter("tspan"):
        assert 0 < float(place.attrib["x"]) < width
        assert 0 < float(place.attrib["y"]) < height


def test_an_unknown_statement_ends_the_build() -> None:
    with pytest.raises(SuperFencesException, match="no statement 'flowchart LR'"):
        sequence_html("flowchart LR\n a --> b")


def test_an_unknown_participant_ends_the_build() -> None:
    with pytest.raises(SuperFencesException, match="no participant 'b'"):
        sequence_html("sequenceDiagram\nparticipant a as A\na->>b: text")
