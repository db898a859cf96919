"""The rule for fields that Quire does not know: they are ignored, unless they would change the
tokens.

A client that asks for other tokens (by sampling, by a constraint, by what the prompt contains) must
not get these silently, so such fields are refused by their names. null, an empty list, an empty
object, and a value that changes nothing are as good as no field.
"""

from collections.abc import Collection, Mapping
from typing import Any

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "best_of": (1,),
    "custom_logit_processor": (),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "length_penalty": (1,),
    "logits_processors": (),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "max_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "n": (1,),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "options": (),
    "received": (),
    "repeat_penalty": (1,),
    "sampling_seed": (),
    "smoothing_factor": (0,),
    "stop_regex": (),
    "tfs_z": (1,),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "xtc_probability": (0,),
}
_CONSTRAINTS: dict[str, tuple[Any, ...]] = {
    "ebnf": (),
    "format": ("", "text"),
    "function_call": ("none", "auto"),
    "functions": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": (),
}
OF_PROMPTS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # to a chat, whose template has its own
    "audio": (),
    "chat_template": (),
    "chat_template_args": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "enable_thinking": (),
    "instructions": ("",),
    "modalities": (["text"],),
    "reasoning": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "system": ("",),
    "thinking": (),
    "truncate_prompt_tokens": (),
}
"""The fields that would change a prompt's tokens -> the values that change nothing. A body that has
such a field of its own serves it."""

OF_REQUESTS = {**_SAMPLING, **_CONSTRAINTS, **OF_PROMPTS}
"""The same for a request for text."""

OF_MESSAGES: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": (), "images": ()}
"""The same for a message of a chat."""

INSTEAD = {
    "chat_template_args": "chat_template_kwargs",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs",
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "json_schema": "structured_outputs.json",
    "max_new_tokens": "max_tokens",
    "max_chunks_per_doc": "truncate_prompt_tokens",
    "max_tokens": "max_output_tokens",
    "max_tokens_per_doc": "truncate_prompt_tokens",
    "messages.function_call": "tool_calls",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_beams": "beam_width",
    "output_format": "output_config.format",
    "reasoning": "reasoning_effort",
    "reasoning_effort": "reasoning.effort",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "system": "a message with role system",
    "thinking": "chat_template_kwargs",
}
"""Refused fields, by their paths without indices -> what does the same in Quire."""

EMPTY: tuple[Any, ...] = (None, [], {})
"""The values with which no unknown field asks for anything."""


def without_ignored(
    fields: dict[str, Any], known: Collection[str], refused: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """`fields` without those to ignore: what is left is known, or is to be refused."""
    return {
        name: value
        for name, value in fields.items()
        if name in known or (name in refused and not _is_one_of(value, (*EMPTY, *refused[name])))
    }


def _is_one_of(value: Any, others: tuple[Any, ...]) -> bool:
    # In Python True == 1, but in JSON true is not 1.
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )
