"""What `make wheels` and `make images` build."""

import re
import subprocess
import sys
import tomllib

import yaml  # type: ignore[import-untyped]

from tests.programs import BIN, DOCKERFILE, ROOT

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


def test_the_dockerfile_has_a_compiler_for_each_platform() -> None:
    (platforms,) = re.findall(r"^  platforms  = \[(.+)\]$", BAKE, re.MULTILINE)
    stages = re.findall(r"^FROM build AS compiler-(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert [f'"linux/{stage}"' for stage in stages] == platforms.split(", ")


def test_wheels_are_built_for_each_python_and_machine() -> None:
    """cibuildwheel itself reads its options from pyproject.toml."""
    command = [str(BIN / "cibuildwheel"), "--platform", "linux", "--print-build-identifiers"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    machines = ("x86_64", "aarch64")
    pythons = ("cp311", "cp312", "cp313")
    wanted = {f"{python}-manylinux_{machine}" for python in pythons for machine in machines}
    assert set(listed.split()) == wanted


def test_wheels_kernels_load_without_pytorch() -> None:
    """The command by which cibuildwheel tests a wheel, in this environment."""
    script = str(ROOT / "deploy" / "load_kernels.py")
    hidden = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({script!r})"
    command = [sys.executable, "-c", hidden]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert listed[-1] == "portable"
    assert "{package}/deploy/load_kernels.py" in str(
        PROJECT["tool"]["cibuildwheel"]["test-command"]
    )
