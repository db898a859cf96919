"""Bodies that are refused: the field that the error names, and what it says."""

from typing import Any

import pytest

from services.gateway.http.bodies.fields import Body
from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.cache import CacheBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.messages_api.body import MessagesBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.scoring import RerankBody, ScoreBody
from services.gateway.http.tokens import TokenizeBody
from services.runtime.errors import InvalidRequest

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
BASES: dict[type[Body], dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    MessagesBody: CHAT | {"max_tokens": 9},
}
"""The fields that the rows of a body leave out."""
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
OTHER = {"type": "function", "function": {"name": "g"}}
FLAT = {"type": "function", "name": "g"}
JSON_FORMAT = {"response_format": {"type": "json_object"}}
ANTHROPIC_TOOL = {"name": "look", "input_schema": {"type": "object"}}


def refusal(body: type[Body], fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        checked(BASES.get(body, {}) | fields, body)
    return caught.value


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def allowed(*tools: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


def block(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [fields]}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def cached(control: object) -> dict[str, Any]:
    return said(content="Hi", cache_control=control)


# Chats and completions, which share most fields

NUMBERS = [
    ({"n": True}, "n: Input should be"),
    ({"n": "2"}, "n: Input should be a valid integer"),
    ({"presence_penalty": "x"}, "presence_penalty: Input should be a valid number"),
    ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    ({"temperature": True}, "temperature: Input should be a valid number"),
    ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 1e300}, "max_tokens: Input should be a valid integer"),
    ({"min_tokens": 1.5}, "min_tokens: Input should be a valid integer"),
    ({"skip_special_tokens": 1}, "skip_special_tokens: Input should be a valid boolean"),
    ({"bad_words": "x"}, "bad_words: Input should be a valid list"),
    ({"stop": [1]}, "stop: must be a string or a list of strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]: Input should be a valid integer"),
    ({"logit_bias": [1]}, "logit_bias: must be an object of token ids"),
    ({"logit_bias": {"1": True}}, "logit_bias: must be an object of token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: '-1' is not a token id"),
    ({"logit_bias": {"the": 1}}, "logit_bias: 'the' is not a token id"),
    ({"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1}}, "logit_bias: is not a token id"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: is not a token id"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias: a bias is too large"),
    ({"beam_width": 3}, "beam_width: is for"),
    ({"length_penalty": 0.5}, "length_penalty: is for"),
    ({"early_stopping": True}, "early_stopping: is for"),
    ({"early_stopping": "soon", "use_beam_search": True}, "early_stopping: Input "),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: not available with stream"),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options: is for requests with stream=true",
    ),
    ({"received": [{"index": 0, "token_ids": [1]}]}, "received: received"),
    ({"structured_outputs": {}}, "structured_outputs: 0 of json, json_object"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs: 2 of json, json_object",
    ),
    ({"structured_outputs": {"json": "[", "whitespace_pattern": " "}}, ": EOF while parsing"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs: are for JSON",
    ),
    ({"structured_outputs": {"regex": "a"}, **JSON_FORMAT}, "structured_outputs: are both given"),
    ({"response_format": {"type": "xml"}}, "response_format: Input tag 'xml' found using"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema: json_schema: Field required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name: name: Field required",
    ),
]
CHATS = [
    (
        {"max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens: differ; give one of them",
    ),
    ({"logprobs": 2}, "logprobs: Input "),
    ({"top_logprobs": 2}, "top_logprobs: is for requests with logprobs=true"),
    ({"echo": True}, "echo: is not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function: Field required"),
    (tool(name="a b"), "tools[0].function.name: pattern"),
    (
        tool(name="f", parameters=3),
        "tools[0].function.parameters: parameters: Input should be a valid dictionary",
    ),
    ({**TOOLS, "tool_choice": OTHER}, "tool_choice: 'g' is not one"),
    ({**TOOLS, "tool_choice": allowed(OTHER)}, "tool_choice: 'g' is not one"),
    ({**TOOLS, "tool_choice": allowed(mode="required")}, "tool_choice: is for requests with"),
    (
        {**TOOLS, "tool_choice": {"type": "custom"}},
        "tool_choice: expected tags: 'function', 'allowed_tools'",
    ),
    ({**TOOLS, "tool_choice": "sometimes"}, "tool_choice: Input "),
    ({"tool_choice": "required"}, "tool_choice: is for requests with tools"),
    ({"reasoning_effort": "most"}, "reasoning_effort: Input should be 'none', "),
    ({"chat_template_kwargs": []}, "chat_template_kwargs: Input should be a valid dictionary"),
    ({"messages": "Hi"}, "messages: Input should be a valid list"),
    ({"messages": ["Hi"]}, "messages[0]: Input should be"),
    ({"messages": [{"role": "", "content": ""}]}, "messages[0].role: String should have"),
    (said(content="Hi", name=7), "messages[0].name: Input should be a valid string"),
    (
        {"messages": [USER, {"role": "user", "content": 7}]},
        "messages[1].content: must be text or a list",
    ),
    (said(content=[{"type": "image_url"}]), "messages[0].content: type 'image_url' are not"),
    (said(content=[{"type": "text"}]), 'messages[0].content: a text part is {"type": "text"'),
    (said(content="Hi", tool_calls=[CALL]), "messages[0].tool_calls: with role assistant"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}]},
        "messages[0].tool_calls[0].function.name: Field required",
    ),
    (cached({"type": "forever"}), "messages[0].cache_control: cache_control"),
    (cached({"type": "ephemeral", "ttl": "2d"}), "messages[0].cache_control: cache_control"),
    (cached("5m"), "messages[0].cache_control: cache_control"),
    ({"enable_thinking": False}, "enable_thinking: use chat_template_kwargs"),
    ({"guided_json": {"type": "object"}}, "guided_json: use structured_outputs.json"),
    ({"functions": [{"name": "f"}]}, "functions: use tools"),
    ({"mirostat": 2}, "mirostat: is not supported"),
    ({"n_predict": 5}, "n_predict: use max_tokens"),
    ({"add_special_tokens": True}, "add_special_tokens: is not supported"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call: is not supported; use tool_calls",
    ),
    (said(content="", images=["x"]), "messages[0].images: is not supported"),
]
COMPLETIONS = [
    ({"logprobs": True}, "logprobs: Input "),
    ({"logprobs": "5"}, "logprobs: Input "),
    ({"suffix": "x"}, "suffix: is not supported"),
]
RESPONSES = [
    ({"previous_response_id": "r"}, "previous_response_id: keeps no responses"),
    ({"conversation": "conv_1"}, "conversation: keeps no responses"),
    ({"background": True}, "background: background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt: stored prompts"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name: pattern"),
    ({"tool_choice": "required"}, "tool_choice: is for requests with tools"),
    (
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "function", "name": "g"},
        },
        "tool_choice: 'g' is not one of",
    ),
    (
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
        },
        "tool_choice: 'g' is not one of",
    ),
    (item(type="web_search_call", role="user"), "input[0].type: 'web_search_call' are not"),
    (item(role="user", content=[{"type": "input_image"}]), "input[0].content: 'input_image'"),
    (item(type="function_call", name="f"), "input[0]: needs call_id"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[0]: needs name"),
    (item(type="function_call_output", output="x"), "input[0]: needs call_id"),
    (item(type="message", content="Hi"), "input[0]: needs role"),
    (item(type="item_reference"), "input[0]: needs id"),
    (item(type="item_reference", id="msg_1"), "input[0]: send the item 'msg_1' itself"),
    ({"n": 2}, "n: not supported"),
    ({"max_tokens": 2}, "max_tokens: use max_output_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort: use reasoning.effort"),
]
MESSAGES = [
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens: Input should be greater"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
    ({"system": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, "system: not text"),
    ({"system": [{"type": "text"}]}, "system[0]: each block of type text needs text"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: Field required"),
    (tool(name="f"), "tools[0].name: should be 'custom'"),
    ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice: type tool needs"),
    (
        {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice: 'g' is not one of",
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens: Input ",
    ),
    ({"cache_control": {"type": "persistent"}}, "cache_control: is {"),
    (
        {"tools": [{**ANTHROPIC_TOOL, "cache_control": {"type": "ephemeral", "ttl": "1d"}}]},
        'tools[0].cache_control: "1h" or',
    ),
    ({"output_format": {"type": "json_schema"}}, "output_format: use output_config.format"),
    ({"n": 2}, "n: is not supported"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    (block(type="image", source={}), "messages[1].content[0].type: blocks of type 'image'"),
    (block(type="document", source={}), "messages[1].content[0].type: blocks of type 'document'"),
    (
        block(type="tool_use", id="t", name="f", input={}),
        "messages[1].content: with role assistant",
    ),
    (block(type="tool_result"), "messages[1].content[0]: needs tool_use_id"),
    (
        block(type="tool_result", tool_use_id="t", content=[{"type": "image"}]),
        "messages[1].content[0].content: parts of type 'image' are not",
    ),
    (block("assistant", type="text", text="I"), "messages: does not continue a message"),
]
EMBEDDINGS = [
    ({}, "input: Field required"),
    ({"input": 3}, "input: must be text, token ids, or a list of either"),
    ({"input": ["a", 3]}, "input: must be text, token ids, or a list of either"),
    ({"input": ["a"] * 2049}, "input: 2049 prompts, at most 2048"),
    ({"input": "a", "dimensions": 0}, "dimensions: Input should be greater"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format: Input should be"),
    ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens: Input should"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side: Input should be 'left'"),
]
SCORES = [
    ({}, ": give text_1 and text_2, or queries and documents"),
    ({"text_1": "a", "documents": "b"}, ": give text_1 and text_2, or"),
    ({"text_1": "a", "text_2": []}, ": give text_1 and text_2, or"),
    ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2: 2 texts for 3 others"),
    ({"text_1": "a", "text_2": ["b", 3]}, "text_2: must be a string or a list"),
]
RANKINGS = [
    ({"query": "a"}, "documents: Field required"),
    ({"query": ["a"], "documents": ["b"]}, "query: Input should be a valid string"),
    ({"query": "a", "documents": [{"title": "b"}]}, "documents[0]: Input should be"),
    ({"query": "a", "documents": ["b"] * 2049}, "documents: at most 2048 items"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n: Input should be"),
    (
        {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
        "max_tokens_per_doc: truncate_prompt_tokens",
    ),
]
TEXTS = [
    ({}, "prompt: one of prompt and messages"),
    ({"prompt": "Hi", **CHAT}, "prompt: one of prompt and messages"),
    ({"prompt": "Hi", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: is for messages"),
    ({"prompt": "Hi", **TOOLS}, "tools: is for messages"),
    ({**CHAT, "add_special_tokens": True}, "add_special_tokens: is for a prompt"),
]
PREFIXES = [
    ({"name": "p", "prompt": "Hi", "tokens": [1]}, "prompt: one of"),
    ({"name": "p", "tokens": [1], "ttl": "2d"}, "ttl: ttl"),
    ({"name": "p"}, "prompt: one of"),
]


@pytest.mark.parametrize(
    ("body", "fields", "problem"),
    [
        *((ChatBody, *row) for row in (*NUMBERS, *CHATS)),
        *((CompletionBody, *row) for row in (*NUMBERS, *COMPLETIONS)),
        *((ResponsesBody, *row) for row in RESPONSES),
        *((MessagesBody, *row) for row in MESSAGES),
        *((EmbeddingBody, *row) for row in EMBEDDINGS),
        *((ScoreBody, *row) for row in SCORES),
        *((RerankBody, *row) for row in RANKINGS),
        *((TokenizeBody, *row) for row in TEXTS),
        *((CacheBody, *row) for row in PREFIXES),
    ],
)
def test_refused_body_names_the_field_at_fault(
    body: type[Body], fields: dict[str, Any], problem: str
) -> None:
    """`problem`: the field, and what its error says."""
    param, message = problem.split(": ", 1)
    error = refusal(body, fields)
    assert (error.param or "") == param
    is_of_pydantic = message.startswith(("Input ", "Field ", "List ", "String "))
    assert (problem if is_of_pydantic else message) in str(error)


def test_text_of_a_refusal_names_a_field_once() -> None:
    error = refusal(ChatBody, {"stream_options": {}})
    assert str(error) == "stream_options is for requests with stream=true"


def test_every_wrong_field_is_named() -> None:
    error = refusal(CompletionBody, {"prompt": 1, "seed": "x", "suffix": "y"})
    names = [part.split(":")[0].split(" ")[0] for part in str(error).split("; ")]
    assert names == ["seed", "prompt", "suffix"]


@pytest.mark.parametrize("text", ["[" * 60_000, "[1", '{"minimum": NaN}'])
def test_a_schema_that_is_no_json_is_a_fault_of_the_client(text: str) -> None:
    asked = {"structured_outputs": {"json": text, "disable_any_whitespace": True}}
    error = refusal(CompletionBody, asked)
    assert any(part in str(error) for part in ("recursion limit", "EOF", "expected value"))
