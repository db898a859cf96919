"""Names and aliases of models."""

import pytest

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
