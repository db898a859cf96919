"""The generated code in quire/v1 equals the output of the Makefile's command for proto/."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    makefile = tmp_path / "Makefile"
    # The same recipe, writing elsewhere.
    text = (ROOT / "Makefile").read_text()
    assert text.count("=. ") == 3
    makefile.write_text(text.replace("=. ", f"={tmp_path} ").replace(":. ", f":{tmp_path} "))
    subprocess.run(
        ["make", "--silent", "--file", str(makefile), "--assume-old=.venv/.installed", "proto"],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    generated = _files(tmp_path / "quire" / "v1")
    committed = _files(ROOT / "quire" / "v1")
    committed.pop("__init__.py")
    assert generated == committed, "run `make proto`"


def _files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("*.py*")}
