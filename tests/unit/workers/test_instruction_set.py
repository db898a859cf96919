"""The instruction set is measured once for a kind of CPU; all workers of a host use the same."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from kvops import contest
from services.common.errors import StartupError
from services.common.text.model_config import ModelConfig
from services.worker import loading
from services.worker.config import WorkerSettings
from services.worker.cpu.instruction_set import measured_isa

SHAPE = contest.ModelShape("bfloat16", ((64, 32),), 4, 2, 16)
SLOWER: contest.Timings = {"few rows": (1.2, 1.0), "many rows": (9.0, 8.0)}
"""As on a Xeon on which the first set is the slower one."""
FASTER: contest.Timings = {"few rows": (0.6, 1.0), "many rows": (4.0, 8.0)}

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C
stepping\t: 8
microcode\t: 0xffffffff
cpu MHz\t\t: 2700.000

processor\t: 1
stepping\t: 9
"""


class MeasuredHost:
    """Counts measurements, each of which gives the result that it is told."""

    def __init__(self, path: Path) -> None:
        self.cache = path / "cache"
        self.cpuinfo = path / "cpuinfo"
        self.cpuinfo.write_text(CPUINFO)
        self.timings = SLOWER
        self.shape = SHAPE
        self.num_measured = 0

    def isa(self) -> str | None:
        return measured_isa(self.shape, self.cache, lambda: None, self.cpuinfo, self._measure)

    def kept(self) -> list[Path]:
        return sorted(self.cache.glob("isa-*.json"))

    def _measure(self, isas: Sequence[str], shape: contest.ModelShape) -> contest.Timings:
        assert (isas, shape) == (("avx512_bf16", "avx512"), self.shape)
        self.num_measured += 1
        return self.timings


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredHost:
    every = ["avx512_bf16", "avx512", "portable"]
    monkeypatch.setattr(contest, "usable_kernels", lambda: every)
    return MeasuredHost(tmp_path)


def test_a_measurement_decides_once_and_for_all(host: MeasuredHost) -> None:
    """Later measurements would have other results, and are not made."""
    assert host.isa() == "avx512"
    host.timings = FASTER
    assert host.isa() == "avx512"
    assert host.num_measured == 1


def test_the_set_that_the_kernels_prefer_is_kept_where_it_is_as_fast(host: MeasuredHost) -> None:
    host.timings = FASTER
    assert host.isa() == "avx512_bf16"


def test_the_file_says_what_was_measured_on_which_cpu(host: MeasuredHost) -> None:
    host.isa()
    (path,) = host.kept()
    kept = json.loads(path.read_text())
    assert kept["times_ms"] == {
        "avx512_bf16": {"few rows": 1200, "many rows": 9000},
        "avx512": {"few rows": 1000, "many rows": 8000},
    }
    assert kept["shape"]["linears"] == [[64, 32]]
    assert (kept["model name"], kept["stepping"]) == ("Intel(R) Xeon(R) Platinum 8481C", "8")


def test_a_different_cpu_is_measured_anew(host: MeasuredHost) -> None:
    """One of the same kind is not, whatever else differs."""
    host.isa()
    host.cpuinfo.write_text(CPUINFO.replace("2700.000", "3100.000"))
    host.isa()
    assert host.num_measured == 1
    host.cpuinfo.write_text(CPUINFO.replace("0xffffffff", "0x2b000590"))
    host.timings = FASTER
    assert host.isa() == "avx512_bf16"
    assert (host.num_measured, len(host.kept())) == (2, 2)


def test_another_shape_is_measured_too(host: MeasuredHost) -> None:
    host.isa()
    host.shape, host.timings = replace(SHAPE, kind="int8"), FASTER
    assert host.isa() == "avx512_bf16"
    assert len(host.kept()) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"isa": "sse9"}'])
def test_a_damaged_file_is_made_again(host: MeasuredHost, text: str) -> None:
    host.isa()
    (path,) = host.kept()
    path.write_text(text)
    assert host.isa() == "avx512"
    assert host.num_measured == 2
    assert json.loads(path.read_text())["isa"] == "avx512"


def test_one_of_several_workers_that_start_at_once_measures(host: MeasuredHost) -> None:
    found: list[str | None] = []
    workers = [Thread(target=lambda: found.append(host.isa())) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == ["avx512"] * 8
    assert host.num_measured == 1


def test_a_directory_that_cannot_be_written_ends_the_start(host: MeasuredHost) -> None:
    host.cache.write_text("a file")
    with pytest.raises(StartupError, match=r"the choice of instructions .*: File exists"):
        host.isa()


@pytest.mark.parametrize(("same", "expected"), [(True, "amx"), (False, "avx512_bf16")])
def test_amx_is_not_used_if_it_differs_from_its_emulation(
    host: MeasuredHost, monkeypatch: pytest.MonkeyPatch, same: bool, expected: str
) -> None:
    usable = ["amx", "avx512_bf16", "portable"]
    monkeypatch.setattr(contest, "usable_kernels", lambda: usable)
    monkeypatch.setattr(contest, "same_results", lambda *_: same)
    times: contest.Timings = {"all": (1.0, 2.0)}
    isa = measured_isa(SHAPE, host.cache, lambda: None, host.cpuinfo, lambda *_: times)
    assert isa == expected


def test_one_of_three_instruction_sets_is_chosen_and_all_times_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "same_results", lambda *_: True)
    sets = ["amx", "avx512_bf16", "avx512"]
    monkeypatch.setattr(contest, "usable_kernels", lambda: [*sets, "portable"])
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO)
    timings = {"few rows": (1.0, 1.4, 1.2), "many rows": (1.0, 9.0, 8.0)}
    isa = measured_isa(SHAPE, tmp_path / "cache", lambda: None, cpuinfo, lambda *_: timings)
    assert isa == "amx"
    (path,) = (tmp_path / "cache").glob("isa-*.json")
    kept = json.loads(path.read_text())
    assert kept["contenders"] == sets
    assert {isa: list(times.values()) for isa, times in kept["times_ms"].items()} == {
        "amx": [1000, 1000],
        "avx512_bf16": [1400, 9000],
        "avx512": [1200, 8000],
    }


def test_a_single_instruction_set_is_not_measured(
    host: MeasuredHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "usable_kernels", lambda: ["avx2", "portable"])
    assert host.isa() == "avx2"
    monkeypatch.setattr(contest, "usable_kernels", lambda: ["portable"])
    assert host.isa() is None
    assert (host.num_measured, host.cache.exists()) == (0, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "int4-32"),
        ({"quantize": "none"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        # Not measured.
        ({"dtype": "bfloat16", "isa": "avx2"}, "avx2"),
        ({"dtype": "bfloat16", "backend": "reference"}, None),
    ],
)
def test_kernels_are_measured_for_the_model_unless_a_setting_names_the_set(
    smollm2: Path, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "measured_isa", lambda shape, *_: shape.kind)
    settings = WorkerSettings.model_validate({"model": "/model", **given})
    config = ModelConfig.from_directory(smollm2)
    assert loading.chosen_isa(settings, config, lambda: None) == expected
