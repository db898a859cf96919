"""`quire chat`: keeps a conversation in the terminal, or answers the lines of a pipe in turn."""

import sys
from dataclasses import replace
from typing import Annotated

from typer import Option

from quire.cli.flags import GatewayFlags
from quire.cli.requests.generate import RequestFlags
from quire.cli.requests.interrupt import ctrl_c_cancels
from quire.cli.requests.sampling import SamplingFlags
from quire.client import Client
from quire.errors import QuireError
from quire.messages import Request, usage_of
from quire.types import ChatMessage

_TEMPERATURE = 0.7
"""The API's default of 1 is for programs that know what they want; small models ramble at it."""

_HELP = """\
/system TEXT  set the system message, without TEXT remove it; the conversation goes on
/reset        forget the conversation, keep the system message
/history      show the conversation
/exit, /quit  end (also Ctrl-D); Ctrl-C cancels an answer"""


def chat(
    gateway: GatewayFlags,
    asked: RequestFlags,
    sampling: SamplingFlags,
    system: Annotated[str | None, Option(metavar="TEXT", help="a system message")] = None,
) -> None:
    """Chat with a model in the terminal; /help lists the commands.

    Without --temperature, answers are drawn at temperature 0.7.

    Standard input may be a pipe: each line is a message, and the first error ends the command.
    """
    # A request id names one request; each turn of a chat is another one.
    if sampling.temperature is None:
        sampling = replace(sampling, temperature=_TEMPERATURE)
    request = replace(asked.request([], sampling.sampling()), request_id="")
    with gateway.connect() as client:
        _Chat(client, request, asked.timeout, system).run()


class _Chat:
    """A conversation. A message whose answer failed leaves it, and the rest stays, even if the
    server is away. A cancelled answer stays as far as it has come, because the reader has seen it.
    """

    def __init__(
        self, client: Client, request: Request, timeout_s: float | None, system: str | None
    ) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._system = system
        self._turns: list[ChatMessage] = []
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self._is_interactive:
            import readline  # noqa: F401 - gives `input` line editing and history

            print("/help lists the commands, Ctrl-D ends")
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if text in ("/exit", "/quit"):
                    return
                self._obey(text)
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        """Return the next message or command, or None at the end."""
        while True:
            try:
                return input("> " if self._is_interactive else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print()

    def _obey(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        if command == "/reset":
            self._turns.clear()
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/history":
            for message in self._messages():
                print(f"{message.role}: {message.content}")
        elif command == "/help":
            print(_HELP)
        else:
            print(f"quire: no command {command}; /help lists them", file=sys.stderr)

    def _answer(self, text: str) -> None:
        self._turns.append(ChatMessage("user", text))
        try:
            answer = self._stream()
        except QuireError as error:
            self._turns.pop()
            if not self._is_interactive:
                raise
            print(f"quire: {error}", file=sys.stderr)
        else:
            self._turns.append(ChatMessage("assistant", answer))

    def _stream(self) -> str:
        """Print the answer as it comes and return it."""
        texts: list[str] = []
        delta = None
        request = replace(self._request, prompt=self._messages())
        try:
            with ctrl_c_cancels(lambda: self._client.send(request, self._timeout_s)) as stream:
                for delta in stream:
                    texts.append(delta.text)
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            print(" [cancelled]")
            return "".join(texts)
        print(flush=True)
        usage_of(delta)
        return "".join(texts)

    def _messages(self) -> list[ChatMessage]:
        head = [ChatMessage("system", self._system)] if self._system else []
        return [*head, *self._turns]
