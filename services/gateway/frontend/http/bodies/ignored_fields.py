"""Drops unsupported fields with values that request nothing, since standard clients send them.

With any other value, such a field is refused by its name, like an unknown field. So nothing that a
client requests is silently ignored.
"""

from collections.abc import Collection
from typing import Any

_OFF: tuple[Any, ...] = (False,)
_EMPTY: tuple[Any, ...] = ([], {})

NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "annotations": _EMPTY,
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "detokenize": (True,),
    "documents": _EMPTY,
    "echo": _OFF,
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_obfuscation": _OFF,
    "kv_transfer_params": (),
    "logits_processors": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "phase": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "refusal": (),
    "return_tokens_as_token_ids": _OFF,
    # Both values have the same effect: no supported model family's decoder adds such spaces.
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_calls": _EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": _EMPTY,
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "vllm_xargs": _EMPTY,
    "web_search_options": (),
}
"""Field -> the values that request nothing, in addition to null."""

SUCCESSORS = {
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}
"""Fields of older APIs -> the fields that took their places."""


def without_ignored(fields: dict[str, Any], supported: Collection[str]) -> dict[str, Any]:
    """`fields` without the unsupported ones that request nothing."""
    return {
        name: value
        for name, value in fields.items()
        if name in supported
        or name not in NO_EFFECT_VALUES
        or not _has_no_effect(value, NO_EFFECT_VALUES[name])
    }


def _has_no_effect(value: Any, inert: tuple[Any, ...]) -> bool:
    # In Python True == 1, but in JSON true is not 1.
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in inert
    )
