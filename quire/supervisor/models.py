"""The models of one run: their names, their files, and the options that each has of its own."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.names import name_problem
from quire.options.flag import flag_of
from quire.options.worker import WorkerOptions
from quire.supervisor.errors import ServeError
from quire.supervisor.model_source import DEMO, find_model, with_draft_directory
from quire.supervisor.options import MAX_SERVICES, ServeOptions

ROLES = ("prefill", "decode")
_MEMORY = ("POOL_MEMORY", "GPU_MEMORY_UTILIZATION")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """One model of a run, which clients know by its name and its aliases."""

    name: str
    path: Path
    """The model's directory or GGUF file."""
    asked_prefill: int | None = None
    """The prefill workers that the user asked for; None leaves it to `mix`."""
    num_decode: int = 1
    aliases: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings of the model's workers, by name in capitals."""

    @property
    def mix(self) -> bool:
        """Whether the decode workers prefill, too."""
        return self.settings.get("MIX") == "true"

    @property
    def num_prefill(self) -> int:
        return (0 if self.mix else 1) if self.asked_prefill is None else self.asked_prefill

    @property
    def roles_elsewhere(self) -> list[str]:
        """The roles for which other hosts have the workers."""
        missing = [role for role in ROLES if not self.number(role)]
        return [] if missing == ["prefill"] and self.mix else missing

    def number(self, role: str) -> int:
        return self.num_prefill if role == "prefill" else self.num_decode

    def worker_settings(self) -> dict[str, str]:
        return {**self.settings, "MODEL": str(self.path), "MODEL_NAME": self.name}


def find_models(options: ServeOptions) -> tuple[ModelOptions, ...]:
    """The models that the options name. Raises ModelNotFound, or ServeError if they do not fit
    together."""
    if options.models and options.model is not None:
        raise ServeError(f"--model {options.model} and {options.models[0]} both name models")
    only = DEMO if options.model is None else options.model
    given = [_split(text) for text in options.models or [only]]
    if options.model_name is not None:
        if not options.model_name:
            raise ServeError("--served-model-name is empty: name the model, or leave the flag out")
        if len(given) > 1 or given[0][0]:
            raise ServeError("--served-model-name is for one MODEL without names of its own")
        given = [(options.model_name, given[0][1])]
    models = [_model(names, source, options) for names, source in given]
    _check_names(models)
    models = _with_own_options(models, options)
    for model in models:
        if len(models) > 1 and not any(name in model.settings for name in _MEMORY):
            raise ServeError(
                f"{model.name}: with several models, each needs the size of its pool: "
                f"--pool-memory SIZE for each of them, or --set {model.name}.pool_memory=SIZE"
            )
    return tuple(models)


def aliases(models: Sequence[ModelOptions]) -> str:
    """Return the gateways' setting of this name, which is empty without aliases."""
    return ",".join(f"{alias}={model.name}" for model in models for alias in model.aliases)


def _split(text: str) -> tuple[str, str]:
    """Return the names and the source in `NAMES=MODEL`; the names may be missing, and empty
    then."""
    names, given, source = text.partition("=")
    is_path = Path(text).expanduser().exists()  # a path may have such a character
    return (names, source) if given and not is_path else ("", text)


def _model(names: str, source: str, options: ServeOptions) -> ModelOptions:
    found = find_model(source, offline=options.offline)
    own = {option.upper(): value for option, value in found.settings.items()}
    settings = own | _with_draft_directory(options.settings(WorkerOptions), options)
    name, *others = names.split(",") if names else [found.name]
    for each in (name, *others):
        if problem := name_problem(each):
            hint = "" if names else f"; NAME={source} gives another"
            raise ServeError(f"{each!r} cannot be the name of a model: it {problem}{hint}")
    return ModelOptions(
        name, found.directory, options.num_prefill, options.num_decode, tuple(others), settings
    )


def _with_draft_directory(settings: dict[str, str], options: ServeOptions) -> dict[str, str]:
    """The settings with the directory of the draft model in the place of its name."""
    if text := settings.get("SPECULATIVE_CONFIG"):
        found = with_draft_directory(json.loads(text), offline=options.offline)
        settings["SPECULATIVE_CONFIG"] = json.dumps(found)
    return settings


def _check_names(models: Sequence[ModelOptions]) -> None:
    names = [name for model in models for name in (model.name, *model.aliases)]
    paths = Counter(model.path for model in models)
    if twice := [path for path, number in paths.items() if number > 1]:
        raise ServeError(
            f"{twice[0]} is given twice; one model may have several names: NAME,ALIAS={twice[0]}"
        )
    if same := [name for name, number in Counter(names).items() if number > 1]:
        raise ServeError(f"the name {same[0]!r} is given to two models: NAME=MODEL gives another")


def _with_own_options(models: list[ModelOptions], options: ServeOptions) -> list[ModelOptions]:
    """The models with the options that were set for one of them."""
    known = WorkerOptions.model_fields
    by_name = {model.name: model for model in models}
    for text in options.own or ():
        place, equals, value = text.partition("=")
        name, _, option = place.rpartition(".")
        option = option.replace("-", "_")
        if not equals or name not in by_name:
            raise ServeError(f"--set {text}: not MODEL.OPTION=VALUE of {', '.join(by_name)}")
        model = by_name[name]
        if option in ROLES:
            if not value.isdecimal() or int(value) > MAX_SERVICES:
                raise ServeError(
                    f"--set {text}: {value!r} is not a number of workers, at most {MAX_SERVICES}"
                )
            changed = "asked_prefill" if option == "prefill" else "num_decode"
            by_name[name] = replace(model, **{changed: int(value)})  # type: ignore[arg-type]
        elif option in known:
            settings = {**model.settings, option.upper(): _parsed(text, option, value)}
            by_name[name] = replace(model, settings=_with_draft_directory(settings, options))
        else:
            raise ServeError(f"--set {text}: {option!r} is no option of one model")
    return list(by_name.values())


def _parsed(text: str, option: str, value: str) -> str:
    """Return the value of an option as its flag reads it. Raises ServeError if it cannot."""
    parser = flag_of(WorkerOptions.model_fields[option]).parser
    try:
        return value if parser is None else str(parser(value))
    except ValueError as error:
        raise ServeError(f"--set {text}: {error}") from error
