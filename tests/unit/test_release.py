"""Files of the deployment agree with the project: versions, requirements, and a Dockerfile without
faults."""

import re
import subprocess
import sys
import tomllib

import yaml  # type: ignore[import-untyped]

from tests.programs import BIN, ROOT, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BAKE = (ROOT / "docker-bake.hcl").read_text()


def test_version_is_one_for_wheels_images_and_chart() -> None:
    version = PROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "quire" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert re.findall(r'^variable "VERSION" \{ default = "(.+)" \}$', BAKE, re.MULTILINE) == [
        version
    ]


def test_the_dockerfile_has_no_faults() -> None:
    run(BIN / "hadolint", "Dockerfile")


def test_the_lists_of_requirements_are_those_of_the_project() -> None:
    def listed(what: str) -> list[str]:
        script = str(ROOT / "deploy" / "requirements.py")
        out: str = subprocess.check_output([sys.executable, script, what], text=True)
        return out.splitlines()

    assert listed("build") == PROJECT["build-system"]["requires"]
    assert listed("project") == PROJECT["project"]["dependencies"]
    extras = PROJECT["project"]["optional-dependencies"]
    assert listed("worker") == extras["worker"]
    assert listed("mover") == extras["mover"]
    assert listed("cuda") == [*extras["worker"], *extras["nvml"], *extras["cuda"][1:]]
