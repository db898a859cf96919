"""/tokenize and /detokenize, as vLLM defines them, and Anthropic's /v1/messages/count_tokens."""

from typing import Any, ClassVar, Self

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api import GenerationRequest, Generator
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.answering.sending import Json
from services.gateway.http.bodies.fields import Body, FieldError, Integers
from services.gateway.http.bodies.messages import Messages
from services.gateway.http.bodies.reading import read_body
from services.gateway.http.bodies.tools import Tools, functions_of, requested_tools
from services.gateway.http.bodies.unknown_fields import OF_PROMPTS
from services.gateway.http.messages_api.body import CountTokensBody


class TokenizeBody(Body):
    """Text as `prompt`, or a chat as `messages`."""

    refused = OF_PROMPTS
    forms: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if sum(getattr(self, name) is not None for name in self.forms) != 1:
            raise FieldError("prompt", f"one of {' and '.join(self.forms)} is needed")
        if self.messages is not None and not self.messages:
            raise FieldError("messages", "messages is empty")
        if self.messages is None:
            for name in ("chat_template_kwargs", "tools"):
                if getattr(self, name):
                    raise FieldError(name, f"{name} is for messages")
        elif self.add_special_tokens:
            text = "add_special_tokens is for a prompt: the chat template has its own"
            raise FieldError("add_special_tokens", text)
        return self

    @property
    def names(self) -> dict[str, str]:
        return {} if self.messages is None else {PROMPT: "messages"}

    def request(self) -> GenerationRequest:
        messages = tuple(message.to_message() for message in self.messages or ())
        return GenerationRequest(
            messages if self.prompt is None else self.prompt,
            model=self.model or "",
            add_special_tokens=self.add_special_tokens is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            template_arguments=self.chat_template_kwargs or {},
            tools=requested_tools(functions_of(self.tools), None, None),
        )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Integers


class TokenEndpoints:
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        with_tokens = bool(body.return_token_strs)
        tokenized = await self._generator.tokenize(body.request(), with_tokens=with_tokens)
        return Json(
            {
                "count": len(tokenized.token_ids),
                "max_model_len": tokenized.max_model_len,
                "tokens": tokenized.token_ids,
                "token_strs": tokenized.tokens,
            }
        )

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountTokensBody)
        tokenized = await self._generator.tokenize(body.request())
        return Json({"input_tokens": len(tokenized.token_ids)})

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        text = await self._generator.detokenize(tuple(body.tokens), body.model or "")
        return Json({"prompt": text})
