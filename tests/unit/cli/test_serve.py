"""`quire serve` with invalid arguments."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.options.flag import flag_name
from quire.options.gateway import GatewayOptions
from quire.options.worker import WorkerOptions
from quire.supervisor.errors import ServeError
from quire.supervisor.models import find_models
from quire.supervisor.options import ServeOptions
from tests.hub_cache import cached, use_empty_cache


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-gap-ms", "abc", "'abc' is not a number from 0 on"),
        ("--max-gap-ms", "inf", "'inf' is not a number from 0 on"),
        ("--grpc-port", "70000", "less than or equal to 65535"),
        ("--decode", "65", "less than or equal to 64"),
        ("--dtype", "float8", "'auto', 'bfloat16', 'float32'"),
        ("--pool-memory", "much", "'much' is not a size such as 512MiB:"),
        ("--pool-memory", "2gib", "'2gib' is not a size"),  # as workers read sizes
        ("--block-size", "1025", "less than or equal to 1024"),
        ("--speculative-config", "ngram", "Invalid JSON"),
        ("--speculative-config", "5", "Input should be an object"),
        ("--speculative-config", '{"method": "ngram"}', "num_speculative_tokens: Field required"),
        (
            "--speculative-config",
            '{"model": "/d", "num_speculative_tokens": 5, "draft_kv_memory": "much"}',
            "draft_kv_memory: 'much' is not a size",
        ),
        (
            "--speculative-config",
            '{"num_speculative_tokens": 5, "method": "draft_model"}',
            "the method draft_model needs a model",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(capsys: Any, flag: str, value: str, message: str) -> None:
    """One line names the flag and the accepted values."""
    assert main(["serve", f"{flag}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: Invalid value for '{flag}'")
    assert message in line
    assert line.endswith(" (see `quire serve --help`)")


SMALL, LARGE = "small=demo", "large={}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{}", "--model", "{}"], "both name models"),
        (["demo", "demo"], "is given twice; one model may have several names"),
        (["a=demo", "b=demo"], "is given twice"),
        (["a=demo", "a={}"], "the name 'a' is given to two models"),
        (["a,b=demo", "b={}"], "the name 'b' is given to two models"),
        (["a,,b=demo"], "'' cannot be the name of a model"),
        (["a,b =demo"], "'b ' cannot be the name of a model: it has control characters, or spaces"),
        (["none=demo"], "'none' cannot be the name of a model: it means no value in settings"),
        ([SMALL, LARGE], "large: with several models, each needs the size of its pool"),
        ([SMALL, LARGE, "--served-model-name", "x"], "--served-model-name is for one MODEL"),
        ([SMALL, "--set", "large.decode=2"], "not MODEL.OPTION=VALUE of small"),
        ([SMALL, "--set", "small.decode"], "not MODEL.OPTION=VALUE of small"),
        ([SMALL, "--set", "small.decode=x"], "'x' is not a number of workers"),
        ([SMALL, "--set", "small.decode=65"], "'65' is not a number of workers, at most 64"),
        ([SMALL, "--set", "small.host=x"], "'host' is no option of one model"),
        (["--model", ""], "the model is empty: name a directory, a GGUF file"),
        (["small="], "the model is empty"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        ([SMALL, "/no/where"], "there is no directory /no/where"),
        ([SMALL, "--set", "small.pool_memory=much"], "'much' is not a size"),
        ([SMALL, "--set", "small.speculative_config={{}}"], "method: Field required"),
    ],
)
def test_models_that_do_not_fit_together_are_named(
    capsys: Any, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "m").mkdir()
    arguments = [flag.format(tmp_path / "m") for flag in flags]
    assert main(["serve", *arguments, "--run-root", str(tmp_path / "runs")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


STORE = ("--redis-url", "redis://h")
PART = ("--decode", "0", *STORE, "--service-host", "10.0.0.1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill", "0", "--decode", "0"], "has neither prefill nor decode"),
        (["--set", "SmolLM2-135M-Instruct.prefill=0"], "no prefill workers on this host"),
        (["--decode", "0", *STORE], "no decode workers on this host, so it needs --service-host"),
        ([*PART, "--device", "cuda:0"], "it needs a mover: add --mover"),
        ([*PART, "--no-mover"], "it needs a mover: leave out --no-mover"),
        ([*PART], "the hosts of a deployment share a secret"),
        (["--mover"], "the hosts of a deployment share a secret"),
    ],
)
def test_a_host_that_cannot_do_its_part_is_told_why(
    capsys: Any, tmp_path: Path, flags: list[str], message: str
) -> None:
    assert main(["serve", *flags, "--run-root", str(tmp_path / "runs")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_host_needs_nixl_for_a_mover(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    assert main(["serve", *STORE, "--service-host", "10.0.0.1"]) == 1
    assert "pip install 'quire-serve[mover]'; with --no-mover each host" in capsys.readouterr().err


def test_each_model_has_names_and_options_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "m=1").mkdir()
    large = str(tmp_path / "m=1")
    own = ["Big.pool_memory=4GiB", "Big.decode=3", "m.v2.kv-dtype=int8"]
    options = ServeOptions(
        models=["m.v2,default,latest=demo", f"Big={large}"], num_prefill=2, own=own
    )
    small, big = find_models(options)
    assert (small.name, small.aliases) == ("m.v2", ("default", "latest"))
    assert small.settings == {"POOL_MEMORY": "1GiB", "KV_DTYPE": "int8"}
    assert (big.path, big.settings) == (Path(large), {"POOL_MEMORY": "4GiB"})
    assert [(m.num_prefill, m.num_decode) for m in (small, big)] == [(2, 1), (2, 3)]
    with pytest.raises(ServeError, match=f"'m=1' cannot be .* equals sign; NAME={large} gives"):
        find_models(ServeOptions(models=[large]))
    (named,) = find_models(ServeOptions(model=large, model_name="a,b c"))
    assert (named.name, named.path, named.aliases) == ("a", Path(large), ("b c",))


DRAFT = '{{"model": "{}", "num_speculative_tokens": 5}}'


def test_a_draft_model_is_found_as_a_model_is(hub_cache: Path, tmp_path: Path) -> None:
    """By its id in the cache, or by its directory; for all models, or for one of them."""
    (tmp_path / "small").mkdir()
    snapshot = cached(hub_cache, "org/tiny")
    text, other = DRAFT.format(tmp_path / "small"), DRAFT.format("org/tiny")
    first, second = find_models(
        ServeOptions(
            models=["one=demo", f"two={snapshot}"],
            speculative_config=text,
            pool_memory="1GiB",
            own=[f"two.speculative_config={other}"],
        )
    )
    found = [json.loads(one.settings["SPECULATIVE_CONFIG"]) for one in (first, second)]
    assert [one["model"] for one in found] == [str(tmp_path / "small"), str(snapshot)]
    assert [one["num_speculative_tokens"] for one in found] == [5, 5]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("/no/where", "there is no directory /no/where"),
        ("org/other", "Download it with: hf download org/other"),
    ],
)
def test_a_draft_model_that_is_not_there_is_named(
    capsys: Any, hub_cache: Path, tmp_path: Path, draft: str, message: str
) -> None:
    arguments = ["--speculative-config", DRAFT.format(draft), "--run-root", str(tmp_path / "runs")]
    assert main(["serve", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_cpus_and_threads_exclude_each_other(capsys: Any) -> None:
    assert main(["serve", "--cpus", "0-3", "--threads", "2"]) == 2
    assert "--cpus and --threads exclude each other" in capsys.readouterr().err


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(monkeypatch, tmp_path)


def test_the_help_is_the_description_of_the_setting(capsys: Any) -> None:
    """Each option of a service is a flag, with its default and without links."""
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    fields = WorkerOptions.model_fields | GatewayOptions.model_fields
    assert all(f"{flag_name(name, field)} " in text for name, field in fields.items())
    assert "tokens of a KV block; default: 16" in text
    assert "](" not in text
