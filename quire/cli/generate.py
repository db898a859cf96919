"""`quire generate`: sends one prompt and prints the answer as it arrives."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Literal

from quire.cli.terminal import Commands, add_client_command, connect, print_json
from quire.errors import InvalidRequest, ServerError
from quire.messages import Request
from quire.types import Beam, Candidate, ChatMessage, Delta, Prompt, Sampling, TokenLogprobs, Usage

_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "false": False,
    "true": True,
    "never": "never",
}


def add_commands(commands: Commands) -> None:
    command = add_client_command(
        commands, "generate", run, help_text="send a prompt and stream the answer"
    )
    command.add_argument("text", help="the prompt; - reads it from standard input")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat",
        action="store_true",
        help="send the text as a user's message through the model's chat template (the default)",
    )
    kind.add_argument(
        "--raw", action="store_true", help="send the text as it is; the model continues it"
    )
    command.add_argument("--system", metavar="TEXT", help="a system message before the user's")
    command.add_argument("--model", default="", help="needed if several models are served")
    _add_sampling_flags(command)
    command.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="lower is served first; refused unless the gateway has --client-priority",
    )
    command.add_argument(
        "--cache-salt", default="", help="share cached prefixes only within this salt"
    )
    command.add_argument("--request-id", default="", help="default: a random id")
    command.add_argument("--timeout", type=float, metavar="S", help="the request's deadline")


def _add_sampling_flags(command: argparse.ArgumentParser) -> None:
    """Add the sampling flags. A parameter whose flag is absent takes the value of the model's
    generation_config, else the server's default."""
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 keeps all")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--repetition-penalty", type=float, metavar="P", help="1 is none")
    group.add_argument("--presence-penalty", type=float, metavar="P", help="0 is none")
    group.add_argument("--frequency-penalty", type=float, metavar="P", help="0 is none")
    _add_repeated(group, "--logit-bias", "ID=BIAS", "add BIAS to the logit of token ID", type=_bias)
    _add_repeated(group, "--allowed-token-id", "ID", "generate only these tokens", type=int)
    _add_repeated(group, "--bad-word", "S", "never generate S")
    group.add_argument("--min-tokens", type=int, metavar="N", help="go on for N tokens at least")
    _add_repeated(group, "--stop", "S", "end the answer at S")
    _add_repeated(group, "--stop-token-id", "ID", "end the answer at this token", type=int)
    group.add_argument("--n", type=int, default=1, metavar="N", help="number of samples")
    group.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="draw N samples and show the --n likeliest, best first, at the end",
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after the eos token")
    group.add_argument(
        "--include-stop", action="store_true", help="include the stop string or token in the answer"
    )
    group.add_argument(
        "--show-special-tokens", action="store_true", help="show tokens like <|im_end|> too"
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="show each token on a line, with its logprob and the K likeliest tokens",
    )
    group.add_argument(
        "--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens"
    )
    _add_beam_flags(command)


def _add_beam_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("beam search")
    group.add_argument("--beam-width", type=int, metavar="N", help="beam search with N beams")
    group.add_argument(
        "--length-penalty", type=float, metavar="P", help="above 0 favours long answers; default: 1"
    )
    group.add_argument(
        "--early-stopping",
        choices=("false", "true", "never"),
        help="when to end once there are as many answers as beams: true: at once; false (the "
        "default): when the best running beam, ended now, would not be among them; never: when no "
        "running beam can still be among them",
    )


def _add_repeated(
    group: argparse._ArgumentGroup,
    flag: str,
    metavar: str,
    help_text: str,
    type: Callable[[str], object] = str,
) -> None:
    group.add_argument(
        flag,
        action="append",
        default=[],
        metavar=metavar,
        type=type,
        help=f"{help_text}; may be repeated",
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS") from error


def run(args: argparse.Namespace) -> int:
    with connect(args) as client, client.send(_request(args), args.timeout) as stream:
        samples = Samples(args.n, _delta_text if args.logprobs is None else _logprob_lines)
        show = print_json if args.json else samples.show
        delta = None
        try:
            for delta in stream:
                show(delta)
        except InvalidRequest as error:
            if args.raw or "chat template" not in str(error):
                raise
            raise InvalidRequest(f"{error}; --raw sends the text as it is", error.code) from error
    if delta is None or delta.usage is None:
        raise ServerError("the stream ended before the request did", "internal")
    if not args.json and sys.stderr.isatty():
        samples.show_usage(delta.usage)
    return 0


def _delta_text(delta: Delta) -> str:
    return delta.text + ("\n" if delta.finish_reason else "")


def _logprob_lines(delta: Delta) -> str:
    """The logprobs of a delta, one line for each token."""
    return "".join(f"{_logprob_line(logprobs)}\n" for logprobs in delta.logprobs)


def _logprob_line(logprobs: TokenLogprobs) -> str:
    """Logprob, rank and text of the chosen token, then the likeliest tokens."""
    chosen = logprobs.chosen
    top = "  ".join(map(_token_logprob, logprobs.top))
    return f"{chosen.logprob:9.4f}  #{chosen.rank:<6} {_quoted(chosen):<16}  {top}".rstrip()


def _token_logprob(candidate: Candidate) -> str:
    return f"{_quoted(candidate)} {candidate.logprob:.4f}"


def _quoted(candidate: Candidate) -> str:
    """The token in quotes, so that spaces and line breaks are visible."""
    return repr(candidate.token.decode(errors="backslashreplace"))


class Samples:
    """Prints the sequences of a request one after another, the current one as it arrives.

    Deltas of later sequences wait until the earlier ones are finished. If there are several
    sequences, each gets a heading. `format_delta`: returns the text to print for a delta.
    """

    def __init__(self, num_samples: int, format_delta: Callable[[Delta], str]) -> None:
        self._num_samples = num_samples
        self._format_delta = format_delta
        self._kept: dict[int, list[Delta]] = {}
        self._reasons: list[str] = []
        self._num_headings = 0

    def show(self, delta: Delta) -> None:
        _print_prompt_logprobs(delta)
        self._kept.setdefault(delta.index, []).append(delta)
        while kept := self._kept.pop(len(self._reasons), []):
            self._print_heading()
            for each in kept:
                print(self._format_delta(each), end="", flush=True)
                if each.finish_reason:
                    self._reasons.append(each.finish_reason)

    def _print_heading(self) -> None:
        number = len(self._reasons) + 1
        if self._num_samples > 1 and self._num_headings < number:
            self._num_headings = number
            print(f"--- {number} of {self._num_samples} ---", flush=True)

    def show_usage(self, usage: Usage) -> None:
        """Print token counts, time to first token and finish reasons to stderr."""
        num_cached = usage.num_cached_tokens
        cached = "" if num_cached is None else f", {num_cached} of them cached"
        print(
            f"[{usage.num_prompt_tokens} prompt tokens{cached}; "
            f"{usage.num_generated_tokens} generated, the first after "
            f"{usage.time_to_first_token_ms:.0f} ms; {', '.join(self._reasons)}]",
            file=sys.stderr,
        )


def _print_prompt_logprobs(delta: Delta) -> None:
    """Print the prompt's logprobs, if any, with an empty line behind them."""
    for logprobs in delta.prompt_logprobs:
        print(_logprob_line(logprobs))
    if delta.prompt_logprobs:
        print(flush=True)


def _request(args: argparse.Namespace) -> Request:
    return Request(
        prompt=_prompt(args),
        sampling=_sampling(args),
        model=args.model,
        request_id=args.request_id,
        priority=args.priority,
        cache_salt=args.cache_salt,
    )


def _sampling(args: argparse.Namespace) -> Sampling:
    """The sampling parameters. A flag with the name of a field of `Sampling` is copied."""
    names = {field.name for field in fields(Sampling)}
    copied = {name: value for name, value in vars(args).items() if name in names}
    copied["stop"] = tuple(args.stop)
    copied["logit_bias"] = dict(args.logit_bias)
    return Sampling(
        **copied,
        stop_token_ids=tuple(args.stop_token_id),
        allowed_token_ids=tuple(args.allowed_token_id) or None,
        bad_words=tuple(args.bad_word),
        include_stop_str_in_output=args.include_stop,
        skip_special_tokens=not args.show_special_tokens,
        beam=_beam(args),
    )


def _beam(args: argparse.Namespace) -> Beam | None:
    if args.beam_width is None:
        if args.length_penalty is not None or args.early_stopping is not None:
            text = "--length-penalty and --early-stopping need --beam-width"
            raise InvalidRequest(text, "usage")
        return None
    early_stopping = _EARLY_STOPPING[args.early_stopping or "false"]
    return Beam(args.beam_width, args.length_penalty, early_stopping)


def _prompt(args: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if args.text == "-" else args.text
    if args.raw:
        if args.system is not None:
            raise InvalidRequest("--system needs a chat; --raw sends no messages", "usage")
        return str(text)
    system = [ChatMessage("system", args.system)] if args.system is not None else []
    return [*system, ChatMessage("user", text)]
