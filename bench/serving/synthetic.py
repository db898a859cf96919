"""An OpenAI-compatible server with known delays, which generates nothing: what a load generator
reports of it can be checked, and how much a generator can take be measured.

    python -m bench.serving.synthetic --port 8900 --ttft-ms 50 --itl-ms 10
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Synthetic:
    """Each answer's first token comes after `ttft_s`, each further one `itl_s` later.
    `statuses`: of the first requests, in turn."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    statuses: list[int] = field(default_factory=list)
    cut_after: int | None = None
    """The connection breaks after so many tokens."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)
    """When each token of each request was written."""

    async def serve(self, port: int = 0) -> asyncio.Server:
        return await asyncio.start_server(self._connection, "127.0.0.1", port)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                arrived = time.perf_counter()
                if not head.startswith(b"POST"):
                    _write_json(writer, 200, {"data": [{"id": "synthetic"}]})
                    continue
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                body = json.loads(await reader.readexactly(int(length)))
                self.arrivals.append(arrived)
                self.bodies.append(body)
                if self.statuses and (status := self.statuses.pop(0)) != 200:
                    _write_json(writer, status, {"error": {"message": "refused"}})
                elif not await self._answer(writer, body, arrived):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], arrived: float
    ) -> bool:
        """Whether the connection goes on."""
        is_chat = "messages" in body
        token = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
        kind = {"object": "chat.completion.chunk" if is_chat else "text_completion"}
        chunk = _event(kind | {"choices": [{"index": 0, "finish_reason": None, **token}]})
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        written: list[float] = []
        self.written.append(written)
        num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        for index in range(num_tokens):
            if index == self.cut_after:
                return False
            due = arrived + self.ttft_s + index * self.itl_s
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            written.append(time.perf_counter())
            writer.write(chunk)
            if index % 64 == 63:
                await writer.drain()
        usage = {"prompt_tokens": _num_prompt_tokens(body), "completion_tokens": num_tokens}
        writer.write(_event(kind | {"choices": [], "usage": usage}))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        return True


def _num_prompt_tokens(body: dict[str, Any]) -> int:
    """Words of text, or ids."""
    if "messages" in body:
        contents = (message["content"] for message in body["messages"])
        texts = (c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents)
        return sum(len(text.split()) for text in texts)
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _event(value: dict[str, Any]) -> bytes:
    head = {"id": "1", "created": 1, "model": "synthetic"}
    return _chunk(b"data: " + json.dumps(head | value).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _write_json(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(body), body)
    )


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    args = parser.parse_args()
    server = await Synthetic(args.ttft_ms / 1000, args.itl_ms / 1000).serve(args.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
