"""What `make wheels` and `make images` build."""

import re
import tomllib

import yaml  # type: ignore[import-untyped]

from tests.programs import DOCKERFILE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BAKE = (ROOT / "docker-bake.hcl").read_text()


def test_version_is_one_for_wheels_images_and_chart() -> None:
    version = PROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "quire" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert re.findall(r'^variable "VERSION" \{ default = "(.+)" \}$', BAKE, re.MULTILINE) == [
        version
    ]


def test_images_are_stages_of_the_dockerfile() -> None:
    """Each target of docker-bake.hcl builds the stage of its name, with tags of its name."""
    targets = dict(re.findall(r'^target "(\w+)" \{\n(.+?)^\}', BAKE, re.MULTILINE | re.DOTALL))
    targets.pop("common")
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    (group,) = re.findall(r'^group "default" \{ targets = \[(.+)\] \}$', BAKE, re.MULTILINE)
    assert set(re.findall(r'"(\w+)"', group)) == targets.keys() <= set(stages)
    for name, body in targets.items():
        assert f'target   = "{name}"' in body
        assert re.findall(r"\{IMAGE\}-(\w+):", body) == [name, name]
