"""Hostile forms of answers: each is refused with a clear error, and no other request notices."""

import asyncio
import json

import jsonschema
import pytest

from quire import InvalidRequest, StructuredOutput
from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import until

LIMIT_S = 90.0
PROMPT = [300, 280, 310, 299]
DIGITS = {"type": "integer", "minimum": 100_000, "maximum": 999_999}
PROPERTIES = {
    "name": {"type": "string", "maxLength": 12},
    "numbers": {"type": "array", "items": DIGITS, "minItems": 60, "maxItems": 70},
}
NUMBERS = {"type": "object", "properties": PROPERTIES, "required": ["name", "numbers"]} | {
    "additionalProperties": False
}
HOSTILE = {
    "a prime number": StructuredOutput(json={"type": "integer", "multipleOf": 999_983}),
    "rules of rules": StructuredOutput(
        grammar="start: a0\na3000: /x/\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(3000))
    ),
}


class Stream:
    """A request whose answer is an object of some 700 tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self.num_tokens, self.text = 0, ""
        self.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        form = StructuredOutput(json=NUMBERS)
        sampling = Sampling(temperature=1.0, seed=7, max_tokens=1500, structured_outputs=form)
        async for delta in client.generate(PROMPT, sampling, timeout_s=LIMIT_S):
            self.num_tokens += len(delta.token_ids)
            self.text += delta.text
        jsonschema.validate(json.loads(self.text), NUMBERS)

    async def is_in_mid_object(self) -> None:
        await until(lambda: self.reading.done() or self.num_tokens >= 100)
        assert not self.reading.done()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_refused_and_disturbs_nobody(
    client: AsyncClient, two_decoders: None, name: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = Stream(client)
        await stream.is_in_mid_object()
        asked = Sampling(structured_outputs=HOSTILE[name], max_tokens=5)
        with pytest.raises(InvalidRequest, match="is too large, too deep or too complex"):
            await client.complete(PROMPT, asked, timeout_s=LIMIT_S)
        await stream.reading
        good = Sampling(structured_outputs=StructuredOutput(regex=f"after {name}"), max_tokens=50)
        assert (await client.complete(PROMPT, good, timeout_s=LIMIT_S)).text == f"after {name}"
