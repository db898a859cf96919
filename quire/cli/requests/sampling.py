"""The sampling flags of `quire generate` and `quire chat`."""

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

from typer import BadParameter, Option

from quire.errors import InvalidRequest
from quire.sampling import SamplingNumbers
from quire.types import Beam, Sampling

_sampling = partial(Option, rich_help_panel="Sampling", show_default=False)
_beam = partial(Option, rich_help_panel="Beam search", show_default=False)


def _each(flag: str, metavar: str, text: str) -> Any:
    return _sampling(flag, metavar=metavar, help=f"{text}; may be repeated")


@dataclass(frozen=True)
class SamplingFlags(SamplingNumbers[float | None, int | None]):
    """How to choose tokens. A field with the name of a field of `Sampling` becomes that field; it
    is None if its flag is absent."""

    max_tokens: Annotated[int | None, _sampling(metavar="N")] = None
    seed: Annotated[int | None, _sampling(metavar="N")] = None
    biases: Annotated[
        list[str], _each("--logit-bias", "ID=BIAS", "add BIAS to the logit of token ID")
    ] = field(default_factory=list)
    allowed: Annotated[
        list[int], _each("--allowed-token-id", "ID", "generate only these tokens")
    ] = field(default_factory=list)
    bad_words: Annotated[list[str], _each("--bad-word", "S", "never generate S")] = field(
        default_factory=list
    )
    stop: Annotated[list[str], _each("--stop", "S", "end the answer at S")] = field(
        default_factory=list
    )
    stop_token_ids: Annotated[
        list[int], _each("--stop-token-id", "ID", "end the answer at this token")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="continue after the eos token")] = (
        False
    )
    include_stop_str_in_output: Annotated[
        bool, _sampling("--include-stop", help="include the stop string or token in the answer")
    ] = False
    show_special: Annotated[
        bool, _sampling("--show-special-tokens", help="show tokens like <|im_end|> too")
    ] = False

    def sampling(self, **more: Any) -> Sampling:
        """Return the sampling parameters, with `more` fields of `Sampling`."""
        names = {one.name for one in fields(Sampling)} & {one.name for one in fields(self)}
        values = {name: getattr(self, name) for name in names}
        lists = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
        return Sampling(
            **values | lists | more,
            logit_bias=dict(map(_bias, self.biases)),
            allowed_token_ids=tuple(self.allowed) or None,
            skip_special_tokens=not self.show_special,
        )


@dataclass(frozen=True)
class SeveralFlags:
    """The options of `quire generate` alone: several answers, and the logprobs of tokens."""

    n: Annotated[int, _sampling(metavar="N", help="number of samples; default: 1")] = 1
    logprobs: Annotated[
        int | None,
        _sampling(
            metavar="K",
            help="show each token on a line, with its logprob and the K likeliest tokens",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, _sampling(metavar="K", help="the same for the prompt's tokens")
    ] = None
    beam_width: Annotated[int | None, _beam(metavar="N", help="beam search with N beams")] = None
    length_penalty: Annotated[
        float | None, _beam(metavar="P", help="above 0 favours long answers; default: 1")
    ] = None
    early_stopping: Annotated[
        Literal["false", "true", "never"] | None,
        _beam(
            help="when to end once there are as many answers as beams: true: at once; false (the "
            "default): when the best running beam, ended now, would not be among them; never: "
            "when no running beam can still be among them"
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """The fields of `Sampling`."""
        names = ("n", "logprobs", "prompt_logprobs")
        return {name: getattr(self, name) for name in names} | {"beam": self._beam()}

    def _beam(self) -> Beam | None:
        if self.beam_width is None:
            if self.length_penalty is not None or self.early_stopping is not None:
                text = "--length-penalty and --early-stopping need --beam-width"
                raise InvalidRequest(text, "usage")
            return None
        when = self.early_stopping
        early_stopping = when if when == "never" else when == "true"
        return Beam(self.beam_width, self.length_penalty, early_stopping)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise BadParameter(f"{text!r} is not ID=BIAS", param_hint="--logit-bias") from error
