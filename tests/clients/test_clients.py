"""Clients that are not part of Quire work unchanged, and get the same text as Quire's own
client."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment

from .conftest import MAX_TOKENS, MODEL, QUESTION, TABLE, TABLE_HEAD, Table
from .venvs import ROOT, client_bin, client_version, own_version

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 240
NUM_REQUESTS = 12


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """The environment of a client's program: no proxy, and nothing of this repository."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    return {**kept, **quiet, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}


def run(command: list[object], env: dict[str, str], cwd: Path, text: str = "") -> str:
    """The program's output; AssertionError, with the end of its output: it failed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


CALLS = {
    "anthropic": (
        "anthropic_client.py",
        "messages: whole, streamed, sync, async; count_tokens, models; errors by their classes",
    ),
    "cohere": ("cohere_client.py", "rerank of Client and ClientV2; an error by its class"),
    "openai": (
        "openai_client.py",
        "models, embeddings; chat, completions, responses: whole, streamed, sync, async; errors "
        "with `param`",
    ),
    "langchain-openai": (
        "langchain_client.py",
        "ChatOpenAI over chat and responses: invoke, stream, ainvoke; OpenAI.invoke",
    ),
    "litellm": (
        "litellm_client.py",
        "completion, stream, acompletion (`hosted_vllm/`), text_completion, responses",
    ),
}


def test_this_environments_openai_client_works(
    deployment: Deployment, expected: str, tmp_path: Path, outside: dict[str, str]
) -> None:
    """The one client that every run of the tests includes, beside reflection."""
    program = PROGRAMS / CALLS["openai"][0]
    command = [sys.executable, program, deployment.http, MODEL, QUESTION, MAX_TOKENS]
    run(command, outside, tmp_path, expected)


def test_a_client_that_knows_only_reflection_generates(
    deployment: Deployment, expected: str, tmp_path: Path, outside: dict[str, str], table: Table
) -> None:
    program = PROGRAMS / "reflection_client.py"
    run(
        [sys.executable, program, deployment.address, QUESTION, MAX_TOKENS],
        outside,
        tmp_path,
        expected,
    )
    called = "lists services, fetches descriptors, calls `Generate` by them, as grpcurl does"
    table.add("grpcio-reflection", own_version("grpcio-reflection"), called, "the same text")


@pytest.mark.clients
@pytest.mark.parametrize("client", CALLS)
def test_a_library_gets_the_same_text(
    client: str,
    deployment: Deployment,
    expected: str,
    tmp_path: Path,
    outside: dict[str, str],
    table: Table,
) -> None:
    name, called = CALLS[client]
    python = client_bin(client) / "python"
    run(
        [python, PROGRAMS / name, deployment.http, MODEL, QUESTION, MAX_TOKENS],
        outside,
        tmp_path,
        expected,
    )
    outcome = "the documents in order" if client == "cohere" else "the same text"
    table.add(client, client_version(client), called, outcome)


CONVERSATIONS = {
    "anthropic": "conversations with tools (whole, streamed), as Claude Code sends them",
    "openai": (
        "conversations of chats and responses (whole, streamed, parsed, with tools), and those of "
        "Codex and Cline"
    ),
}


@pytest.mark.clients
@pytest.mark.parametrize("client", CONVERSATIONS)
def test_every_object_of_a_conversation_is_taken_back(
    client: str, with_tools: Deployment, tmp_path: Path, outside: dict[str, str], table: Table
) -> None:
    """The ordinary tests play the same conversations with workers that write what they must
    (`tests/integration/gateway/conversations`)."""
    program = PROGRAMS / f"{client}_conversations.py"
    run([client_bin(client) / "python", program, with_tools.http, MODEL], outside, tmp_path)
    outcome = "every object that came is taken back"
    table.add(client, client_version(client), CONVERSATIONS[client], outcome)


_CHOICE = """\
task: quire_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
_GENERATE = """\
task: quire_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
_QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a desk"], "label": 0},
    {"question": "Birds can", "choices": [" marble", " fly"], "label": 1},
]


@pytest.mark.clients
def test_lm_eval_measures_likelihoods_and_generates(
    deployment: Deployment,
    tokenizer_directory: Path,
    tmp_path: Path,
    outside: dict[str, str],
    table: Table,
) -> None:
    """With tasks and data of its own directory, so that nothing is downloaded."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in _QUESTIONS))
    for name, task in (("choice", _CHOICE), ("generate", _GENERATE)):
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data))
    arguments = (
        f"model={MODEL},base_url={deployment.http}/v1/completions,tokenizer={tokenizer_directory}"
    )
    run(
        [
            *(client_bin("lm-eval") / "lm-eval", "run", "--model", "local-completions"),
            *("--model_args", f"{arguments},num_concurrent=2,max_retries=1"),
            *("--include_path", tmp_path, "--tasks", "quire_choice,quire_generate"),
            *("--output_path", tmp_path / "out"),
        ],
        outside | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        tmp_path,
    )
    (report,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(report.read_text())["results"]
    assert results["quire_choice"]["acc,none"] == 1.0
    assert "exact_match,none" in results["quire_generate"]
    called = "`local-completions`: loglikelihood (multiple choice), generate_until; a local task"
    table.add("lm-eval", client_version("lm-eval"), called, "accuracy 1.0 of 2 questions")


@pytest.mark.clients
def test_guidellm_measures(
    deployment: Deployment,
    tokenizer_directory: Path,
    tmp_path: Path,
    outside: dict[str, str],
    table: Table,
) -> None:
    run(
        [
            *(client_bin("guidellm") / "guidellm", "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={deployment.http},model={MODEL}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer_directory}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--output", f"kind=json,path={tmp_path / 'out.json'}"),
        ],
        outside | {"HF_HUB_OFFLINE": "1"},
        tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    called = "4 concurrent streams over chat completions, synthetic text"
    outcome = f"{NUM_REQUESTS} of {NUM_REQUESTS} requests"
    table.add("guidellm", client_version("guidellm"), called, outcome)


@pytest.mark.clients
def test_aiperf_measures(
    deployment: Deployment,
    tokenizer_directory: Path,
    tmp_path: Path,
    outside: dict[str, str],
    table: Table,
) -> None:
    run(
        [
            *(client_bin("aiperf") / "aiperf", "profile", "--model", MODEL),
            *("--url", deployment.http, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", tokenizer_directory),
            *("--concurrency", 4, "--num-requests", NUM_REQUESTS),
            *("--isl", 32, "--osl", 16, "--output-artifact-dir", tmp_path / "out"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--ui-type", "none"),
        ],
        outside,
        tmp_path,
    )
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_latency"]["count"] == NUM_REQUESTS
    called = "`profile --endpoint-type chat --streaming`, concurrency 4"
    outcome = f"{NUM_REQUESTS} of {NUM_REQUESTS} requests"
    table.add("aiperf", client_version("aiperf"), called, outcome)


CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.mark.clients
def test_schemathesis_finds_nothing(
    short_context: Deployment, tmp_path: Path, outside: dict[str, str], table: Table
) -> None:
    """The server gives no 500, its answers match /openapi.json, and it refuses what that does not
    allow."""
    output = run(
        [
            *(client_bin("schemathesis") / "schemathesis", "run"),
            *(f"{short_context.http}/openapi.json", "--max-examples", 30, "--seed", 1),
            *("--checks", ",".join(CHECKS), "--no-color", "--request-timeout", LIMIT_S),
        ],
        outside,
        tmp_path,
    )
    cases = re.search(r"(\d+) generated, \d+ passed", output)
    assert cases, output[-2000:]
    called = "every operation of /openapi.json: " + ", ".join(CHECKS)
    outcome = f"{cases[1]} cases, no failure"
    table.add("schemathesis", client_version("schemathesis"), called, outcome)


@pytest.mark.skipif(TABLE in os.environ, reason="this run writes the table at its end")
def test_the_table_in_the_docs_has_every_client() -> None:
    table = (ROOT / "docs" / "clients.md").read_text()
    rows = table.partition(TABLE_HEAD)[2].splitlines()
    names = {row.split(" | ")[0].removeprefix("| ") for row in rows}
    clients = {"grpcio-reflection", "lm-eval", "guidellm", "aiperf", "schemathesis", *CALLS}
    assert names == clients
