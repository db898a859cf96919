"""`quire generate`: its requests, its output, and its end."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest

from quire.cli import main
from quire.v1 import sampling_pb2
from quire.v1.logprobs_pb2 import Candidate


def test_text_goes_as_a_chat_and_the_answer_streams(hello: Any, capsys: Any) -> None:
    assert main(["generate", "Hi", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    messages = hello.requests[0].chat.messages
    assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "Hi")]


def test_raw_text_goes_as_it_is(hello: Any) -> None:
    assert main(["generate", "--raw", "Once upon"]) == 0
    assert hello.requests[0].text == "Once upon"


def test_a_dash_reads_standard_input(hello: Any, types: Any) -> None:
    types("from a pipe")
    assert main(["generate", "-"]) == 0
    assert hello.requests[0].chat.messages[0].content == "from a pipe"


def test_options_not_given_are_left_to_the_server(hello: Any) -> None:
    main(["generate", "Hi"])
    sampling = hello.requests[0].sampling
    optional = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    # A seed is drawn by the client: whichever gateway goes on draws the same tokens.
    given = {name: getattr(sampling, name) for name in optional if sampling.HasField(name)}
    assert given == {"seed": given["seed"], "max_tokens": 1024}


def test_every_sampling_flag_arrives(hello: Any) -> None:
    flags = "--max-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.75 --min-p 0.25 --seed 0"
    main(["generate", "Hi", *flags.split(), "--stop", "a", "--stop", "b", "--ignore-eos"])
    sampling = hello.requests[0].sampling
    assert sampling.HasField("seed")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 0.5, 7)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.75, 0.25, 0)
    assert list(sampling.stop) == ["a", "b"]
    assert sampling.ignore_eos
    assert sampling.skip_special_tokens


def test_logit_and_text_options_arrive(hello: Any) -> None:
    flags = "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.25"
    flags += " --logit-bias 7=2.5 --logit-bias 8=-1 --allowed-token-id 7 --allowed-token-id 8"
    flags += " --min-tokens 3 --stop-token-id 9 --include-stop --show-special-tokens"
    assert main(["generate", "Hi", *flags.split(), "--bad-word", "a b", "--bad-word", "c"]) == 0
    sampling = hello.requests[0].sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert (sampling.frequency_penalty, sampling.min_tokens) == (-0.25, 3)
    assert dict(sampling.logit_bias) == {7: 2.5, 8: -1.0}
    assert list(sampling.allowed_token_ids) == [7, 8]
    assert list(sampling.bad_words) == ["a b", "c"]
    assert list(sampling.stop_token_ids) == [9]
    assert sampling.include_stop_str_in_output
    assert sampling.HasField("skip_special_tokens")
    assert not sampling.skip_special_tokens


@pytest.mark.parametrize("bias", ["7", "7=", "x=1", "=1"])
def test_a_bias_is_a_token_and_a_number(bias: str, capsys: Any) -> None:
    assert main(["generate", "Hi", "--logit-bias", bias]) == 2
    assert f"{bias!r} is not ID=BIAS" in capsys.readouterr().err


def test_samples_are_shown_one_after_another(samples: Any, capsys: Any) -> None:
    """The first appears as it comes; the text of the second so far appears when its turn comes."""
    assert main(["generate", "Hi", "--n", "2"]) == 0
    assert samples.requests[0].sampling.n == 2
    shown = "--- 1 of 2 ---\none two\n--- 2 of 2 ---\neins zwei\n"
    assert capsys.readouterr().out == shown


def test_json_gives_one_delta_a_line(hello: Any, capsys: Any) -> None:
    assert main(["generate", "Hi", "--json"]) == 0
    first, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["text"] == "Hello,"
    assert first["usage"] is None
    assert last["finish_reason"] == "stop"
    assert last["stopped_by"] == 9
    assert last["usage"]["num_cached_tokens"] == 16


def candidate(token: bytes, logprob: float, rank: int) -> Any:
    return Candidate(token_id=7, token=token, logprob=logprob, rank=rank)


def with_logprobs(hello: Any) -> None:
    """The first token is one of two, the second is half of a character; the prompt has two."""
    first, last = hello.responses
    top = [candidate(b"Hello", -0.5, 1), candidate(b"\nHi", -2.0, 2)]
    first.deltas[0].logprobs.add(chosen=top[0], top=top)
    first.prompt_logprobs.add(chosen=candidate(b" you", -3.25, 12345), top=top[:1])
    last.deltas[0].logprobs.add(chosen=candidate(b"\xe2\x82", -1.0, 3), top=top[:1])


def test_logprobs_are_shown_a_token_a_line(hello: Any, capsys: Any) -> None:
    """Those of the prompt come first; a token stays on its line whatever characters it has."""
    with_logprobs(hello)
    assert main(["generate", "Hi", "--logprobs", "2", "--prompt-logprobs", "1"]) == 0
    sampling = hello.requests[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 1)
    assert capsys.readouterr().out.splitlines() == [
        "  -3.2500  #12345  ' you'            'Hello' -0.5000",
        "",
        "  -0.5000  #1      'Hello'           'Hello' -0.5000  '\\nHi' -2.0000",
        "  -1.0000  #3      b'\\xe2\\x82'       'Hello' -0.5000",
    ]


def test_logprobs_as_json(hello: Any, capsys: Any) -> None:
    with_logprobs(hello)
    assert main(["generate", "Hi", "--logprobs", "2", "--json"]) == 0
    first, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["logprobs"][0]["chosen"] == {
        "token_id": 7,
        "logprob": -0.5,
        "rank": 1,
        "token": "Hello",
    }
    assert [each["token"] for each in first["logprobs"][0]["top"]] == ["Hello", "\nHi"]
    assert last["logprobs"][0]["chosen"]["token"] == "\\xe2\\x82"


def test_a_refusal_is_one_line_and_status_1(hello: Any, capsys: Any) -> None:
    hello.refuse(grpc.StatusCode.NOT_FOUND, "no such thing")
    assert main(["generate", "Hi"]) == 1
    assert capsys.readouterr().err == "quire: no such thing\n"


def test_a_model_without_a_chat_template_has_a_hint(hello: Any, capsys: Any) -> None:
    hello.refuse(grpc.StatusCode.INVALID_ARGUMENT, "the model has no chat template")
    assert main(["generate", "Hi"]) == 1
    assert capsys.readouterr().err.endswith("; --raw sends the text as it is\n")


def test_an_answer_that_is_cut_short_is_a_failure(hello: Any, capsys: Any) -> None:
    del hello.responses[-1]
    assert main(["generate", "Hi"]) == 1
    assert capsys.readouterr().err == "quire: the stream ended before the request did\n"


def test_a_value_that_the_wire_cannot_carry_is_an_error(hello: Any, capsys: Any) -> None:
    assert main(["generate", "Hi", "--max-tokens", "-1"]) == 1
    assert capsys.readouterr().err.startswith("quire: the request cannot be sent: max_tokens is -1")
    assert hello.requests == []


def test_an_absent_gateway_has_its_own_exit_status(capsys: Any) -> None:
    assert main(["generate", "Hi", "--address", "127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.startswith("quire: no server answers at 127.0.0.1:1 (is `quire")
    assert main(["generate", "Hi", "--address", "http://127.0.0.1:1"]) == 3
    assert "--address names another gateway" in capsys.readouterr().err


def test_ctrl_c_cancels_the_request_and_leaves_quietly(hello: Any) -> None:
    hello.endless = True
    command = [sys.executable, "-m", "quire.cli", "generate", "Hi"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(len("Hello, world")) == b"Hello, world"
        os.kill(process.pid, signal.SIGINT)
        assert hello.cancelled.wait(timeout=10)
        assert process.wait(timeout=10) == 130
        assert process.stderr.read() == b""


def test_a_reader_that_goes_away_ends_it_quietly(hello: Any) -> None:
    """As in `quire generate ... | head -c 1`."""
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    command = [sys.executable, "-m", "quire.cli", "generate", "Hi"]
    done = subprocess.run(command, stdout=writing_end, stderr=subprocess.PIPE, timeout=20)
    os.close(writing_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_flags_of_a_beam_search_arrive(hello: Any) -> None:
    flags = "--beam-width 4 --length-penalty 0.5 --early-stopping never --n 2"
    assert main(["generate", "Hi", *flags.split()]) == 0
    beam = hello.requests[0].sampling.beam
    assert (beam.width, beam.length_penalty) == (4, 0.5)
    assert beam.early_stopping == sampling_pb2.EARLY_STOPPING_NEVER


def test_without_a_width_there_is_no_beam_search(hello: Any, capsys: Any) -> None:
    assert main(["generate", "Hi", "--length-penalty", "2"]) == 1
    assert "--beam-width" in capsys.readouterr().err
    assert main(["generate", "Hi"]) == 0
    assert not hello.requests[0].sampling.HasField("beam")
