"""Load on a running server, as its clients see it: Quire's gateway over gRPC, or any OpenAI server.

    quire serve --model DIR &
    python -m bench.serve closed --model DIR --streams 1 8 16 --prompt 128 --tokens 128
    python -m bench.serve poisson --model DIR --rate 0.5 1 --requests 60
    python -m bench.serve prefix --model DIR
    python -m bench.serve interference --model DIR --json
    python -m bench.serve closed --model DIR --http http://127.0.0.1:8100 --served-model bench

closed          N clients, each sends its next prompt when the last one was answered
poisson         prompts arrive at random times; goodput counts requests with a first token within
                5 s and every gap below 150 ms
prefix          requests that share a prefix which nobody has computed (cold), then others (warm)
interference    streams decode while a long prompt arrives

Greedy, no end of sequence, prompts of random token ids (`--text`: text of as many tokens), drawn
from the vocabulary of `--model`, the checkpoint that is served. Latencies are of arrivals at the
client; `decode tok/s` is the rate while all streams decode, `tok/s` is over the whole time.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from bench.serving.measure import Measurement, closed, interfered, poisson_arrivals, prefixed
from bench.serving.prompts import Prompts
from bench.serving.report import table
from bench.serving.target import GatewayTarget, HttpTarget, RequestFailed, Target
from quire.calls import DEFAULT_ADDRESS

Options = argparse.Namespace
EMBEDDED = Path(__file__).parents[1] / "quire" / "embedded"


async def run_closed(
    target: Target, prompts: Prompts, options: Options
) -> AsyncIterator[Measurement]:
    for streams in options.streams:
        yield await closed(target, prompts, streams, options.prompt, options.tokens, options.turns)


async def run_poisson(
    target: Target, prompts: Prompts, options: Options
) -> AsyncIterator[Measurement]:
    for rate in options.rate:
        yield await poisson_arrivals(
            target, prompts, rate, options.requests, options.prompt, options.tokens, options.seed
        )


async def run_prefix(
    target: Target, prompts: Prompts, options: Options
) -> AsyncIterator[Measurement]:
    for measurement in await prefixed(
        target, prompts, options.requests, options.prefix, options.prompt, options.tokens
    ):
        yield measurement


async def run_interference(
    target: Target, prompts: Prompts, options: Options
) -> AsyncIterator[Measurement]:
    for streams in options.streams:
        yield await interfered(target, prompts, streams, options.prompt, options.long)


async def measure(options: Options) -> None:
    target: Target = (
        HttpTarget(options.http, options.served_model)
        if options.http
        else GatewayTarget(options.address)
    )
    prompts = Prompts.of(options.model, options.seed, options.text)
    await closed(target, prompts, 2, 32, 8, 1)  # connections and caches are warm from here on
    measurements = [each async for each in options.run(target, prompts, options)]
    await target.close()
    if options.json:
        print("\n".join(json.dumps(each.as_json()) for each in measurements))
    else:
        print(table(measurements))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(required=True)

    def command(name: str, run: Callable[..., object]) -> Callable[[str, type, object], None]:
        added = commands.add_parser(name)
        added.set_defaults(run=run)
        _add_common(added)

        def option(flag: str, kind: type, default: object) -> None:
            nargs = "+" if isinstance(default, list) else None
            added.add_argument(flag, type=kind, default=default, nargs=nargs, help=f"{default}")

        return option

    option = command("closed", run_closed)
    option("--streams", int, [1, 8, 16])
    option("--prompt", int, 128)
    option("--tokens", int, 128)
    option("--turns", int, 1)
    option = command("poisson", run_poisson)
    option("--rate", float, [0.5])
    option("--requests", int, 60)
    option("--prompt", int, 512)
    option("--tokens", int, 128)
    option = command("prefix", run_prefix)
    option("--requests", int, 16)
    option("--prefix", int, 1024)
    option("--prompt", int, 64)
    option("--tokens", int, 16)
    option = command("interference", run_interference)
    option("--streams", int, [4])
    option("--prompt", int, 128)
    option("--long", int, 2048)
    return result


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", default=DEFAULT_ADDRESS, help="Quire's gateway, host:port")
    command.add_argument("--http", metavar="URL", help="an OpenAI server instead")
    command.add_argument("--served-model", default="bench", help="what an OpenAI server calls it")
    command.add_argument("--model", type=Path, default=EMBEDDED, metavar="DIR")
    command.add_argument("--text", action="store_true", help="send text instead of token ids")
    command.add_argument("--seed", type=int, default=0, help="another one draws other prompts")
    command.add_argument("--json", action="store_true", help="one object a line")


def main() -> None:
    try:
        asyncio.run(measure(parser().parse_args()))
    except (RequestFailed, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
