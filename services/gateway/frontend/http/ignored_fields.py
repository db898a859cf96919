"""Fields that are not supported, but that standard clients send with values that ask for nothing.

Such a value is dropped; with any other the field is refused as every unknown one, by its name:
nothing that a client asks for is silently ignored.
"""

from collections.abc import Collection
from typing import Any

_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {})

INERT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "annotations": _EMPTY,
    "audio": (),
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "detokenize": (True,),
    "documents": _EMPTY,
    "echo": _OFF,
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "include_obfuscation": _OFF,
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "refusal": (),
    "response_format": ({"type": "text"},),
    # Neither puts any there: no decoder of a supported family does.
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_calls": _EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": _EMPTY,
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": (),
}
"""Field -> values that ask for nothing; null always does."""


def without_ignored(fields: dict[str, Any], supported: Collection[str]) -> dict[str, Any]:
    """The fields but for the unsupported ones that ask for nothing."""
    return {
        name: value
        for name, value in fields.items()
        if name in supported or name not in INERT or not _asks_for_nothing(value, INERT[name])
    }


def _asks_for_nothing(value: Any, inert: tuple[Any, ...]) -> bool:
    """Equal to one of them, but true is not 1."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in inert
    )
