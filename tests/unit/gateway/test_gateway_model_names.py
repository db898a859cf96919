"""Names and aliases of models."""

from typing import Any

import pytest

from services.gateway.access.caller import Caller, bind_caller
from services.gateway.access_control import AccessControl
from services.gateway.api import ServedModel
from services.gateway.workers.models.model_names import choose_model, parse_aliases, with_aliases
from services.runtime.errors import InvalidRequest, StartupError, UnknownModel

ALIASES = {"default": "small", "gpt-4": "big", "big": "small", "later": "gone"}


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["x"], "'x' is not ALIAS=MODEL"),
        (["=x"], "'=x' is not ALIAS=MODEL"),
        (["x="], "'x=' is not ALIAS=MODEL"),
        (["x=a", "x=b"], "'x' stands for a and for b"),
        (["none=a"], "'none' means no value in settings"),
        (["x=a", "y=x"], "'y' stands for another alias"),
    ],
)
def test_wrong_aliases_are_refused_at_the_start(entries: list[str], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        parse_aliases(entries)


def test_an_alias_is_served_with_its_model_and_never_replaces_one() -> None:
    assert with_aliases(["small"], ALIASES) == {
        "small": "small",
        "default": "small",
        "big": "small",
    }
    both = with_aliases(["big", "small"], ALIASES)
    assert both == {"small": "small", "big": "big", "default": "small", "gpt-4": "big"}


def test_a_name_means_one_model() -> None:
    models = with_aliases(["big", "small"], ALIASES)
    assert choose_model("default", models) == "small"
    assert choose_model("", {"small": "small", "default": "small"}) == "small"
    with pytest.raises(UnknownModel, match="these are: big, default, gpt-4, small"):
        choose_model("other", models)
    with pytest.raises(InvalidRequest, match="the request names one: big, default, gpt-4, small"):
        choose_model("", models)
    with pytest.raises(UnknownModel, match="these are: none"):
        choose_model("", {})
    with pytest.raises(UnknownModel, match="these are: poet"):
        choose_model("other", {}, adapters=["poet"])


class Listing:
    """A generator that serves `small`, also as `default`, and `big`."""

    def models(self) -> tuple[ServedModel, ...]:
        names = {"big": "big", "default": "small", "small": "small"}
        return tuple(ServedModel(*(name, 1, 1, ""), root) for name, root in names.items())


@pytest.mark.parametrize(
    ("allowed", "seen", "meant"),
    [
        ({"small"}, ["default", "small"], "small"),
        ({"default"}, ["default"], "small"),
        ({"big"}, ["big"], "big"),
    ],
)
async def test_a_key_for_a_model_may_use_its_aliases_too(
    allowed: set[str], seen: list[str], meant: str
) -> None:
    """A key for an alias may use only the alias. A coroutine: the caller that it binds is bound
    in no other test."""
    nothing: Any = None
    listing: Any = Listing()
    control = AccessControl(listing, nothing)
    bind_caller(Caller(models=frozenset(allowed)))
    assert [model.model for model in control.models()] == seen
    assert control._visible("") == meant
    with pytest.raises(UnknownModel):
        control._visible("other")
