"""A client of `bench.overload` that has a process to itself: what it waits for is not itself.

    python -m bench.overload_client ADDRESS RATE SECONDS DEADLINE SEED

Requests at random times, each on a thread of the synchronous client. Prints a line when it begins,
and at the end how each of them ended, and after how many seconds, as JSON.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.client import Client
from quire.errors import DeadlineExceeded, Overloaded
from quire.messages import Request
from quire.types import Sampling

NUM_PROMPT_TOKENS, MAX_TOKENS = 32, 256
GOOD, LATE, REFUSED = "good", "late", "refused"

BEGINS = b"begins\n"

_NUM_CONNECTIONS = 4


def request(rng: random.Random) -> Request:
    prompt = [rng.randrange(300, 1000) for _ in range(NUM_PROMPT_TOKENS)]
    return Request(prompt, Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))


def ask(client: Client, asked: Request, deadline_s: float) -> tuple[str, float]:
    began = time.perf_counter()
    outcome = GOOD
    try:
        for _ in client.send(asked, deadline_s):
            pass
    except Overloaded:
        outcome = REFUSED
    except DeadlineExceeded:
        outcome = LATE
    return outcome, time.perf_counter() - began


def offer(
    clients: Sequence[Client], rng: random.Random, rate: float, seconds: float, deadline_s: float
) -> list[tuple[str, float]]:
    due = time.perf_counter()
    until = due + seconds
    answers = []
    with ThreadPoolExecutor(max_workers=256) as threads:
        while (due := due + rng.expovariate(rate)) < until:
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = request(rng)
            answers.append(threads.submit(ask, rng.choice(clients), asked, deadline_s))
    return [answer.result() for answer in answers]


def main() -> None:
    address, *numbers = sys.argv[1:]
    rate, seconds, deadline_s, seed = map(float, numbers)
    clients = [Client(address) for _ in range(_NUM_CONNECTIONS)]
    for client in clients:
        client.models()  # connects
    print(BEGINS.decode(), end="", flush=True)
    print(json.dumps(offer(clients, random.Random(seed), rate, seconds, deadline_s)))


if __name__ == "__main__":
    main()
