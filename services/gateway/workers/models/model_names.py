"""The names by which clients know models: each model's own, and its aliases."""

from collections.abc import Mapping, Sequence

from quire.names import name_problem
from services.runtime.errors import InvalidRequest, StartupError, UnknownModel

_SETTING = "model_aliases"


def parse_aliases(entries: Sequence[str]) -> dict[str, str]:
    """Return the model of each alias. Raises StartupError if an entry is not ALIAS=MODEL, or if an
    alias stands for two models, or for another alias."""
    models: dict[str, str] = {}
    for entry in entries:
        alias, _, model = entry.partition("=")
        if not alias or not model:
            raise StartupError(f"{_SETTING}: {entry!r} is not ALIAS=MODEL")
        if problem := name_problem(alias):
            raise StartupError(f"{_SETTING}: {alias!r} {problem}")
        if models.setdefault(alias, model) != model:
            raise StartupError(f"{_SETTING}: {alias!r} stands for {models[alias]} and for {model}")
    if chained := [alias for alias, model in models.items() if model in models]:
        raise StartupError(f"{_SETTING}: {chained[0]!r} stands for another alias")
    return models


def with_aliases(names: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The served model of each name. A served model's own name precedes an alias."""
    served = {alias: model for alias, model in aliases.items() if model in names}
    return {**served, **{name: name for name in names}}


def choose_model(
    name: str, models: Mapping[str, str], param: str = "model", adapters: Sequence[str] = ()
) -> str:
    """The model that `name` means; an empty name means the only one. `models` has the models by
    their names, `param` is the request's parameter, and `adapters` are more names for the error's
    text. Raises UnknownModel if the model is not served, and InvalidRequest if the name is empty
    and several models are served."""
    if name in models:
        return models[name]
    served = ", ".join([*sorted(models), *adapters]) or "none"
    if name or not models:
        raise UnknownModel(f"model {name!r} is not served here; these are: {served}", param)
    if len(set(models.values())) > 1:
        raise InvalidRequest(
            f"several models are served, so the request names one: {served}", param
        )
    return next(iter(models.values()))
