"""Requests like those of the PagedAttention paper (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023), drawn from log-normal fits.

The paper's Figure 11 gives the means: ShareGPT 161.31 tokens in and 337.99 out, Alpaca 19.31 in
and 58.45 out. How far ShareGPT's outputs spread follows from its Figure 2: of what Orca (Max)
reserves 13.3 / 91.1 are for tokens that come later. Averaged over time, a request that will have o
of them has half of them before it and counts o times, so E[o^2] / (2 E[o]) is 2048 * 13.3 / 91.1 =
299 tokens; and as E[o^2] / E[o]^2 is exp(sigma^2) of a log-normal distribution, sigma is 0.755. The
other spreads are ours: the paper shows them as histograms only, with long tails, and says that
Alpaca's vary less.

Lengths are cut, as the paper's models are, to 2048 tokens in all, at most half of them the prompt.

    python -m bench.kv.traces sharegpt > FILE      2,000 of them, for `quire advise --workload FILE`
"""

import argparse
import json
import math
import random
from dataclasses import dataclass

from advisor.workload import RecordedRequest

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Spread:
    """Log-normal, of this mean; `sigma` is the logarithm's."""

    mean: float
    sigma: float

    def draw(self, random_: random.Random, most: int) -> int:
        median = self.mean / math.exp(self.sigma**2 / 2)
        return min(max(1, round(random_.lognormvariate(math.log(median), self.sigma))), most)


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    prompt: Spread
    output: Spread

    def requests(self, count: int, seed: int) -> tuple[RecordedRequest, ...]:
        """The same ones for the same seed."""
        random_ = random.Random(seed)
        drawn = []
        for _ in range(count):
            num_prompt = self.prompt.draw(random_, CONTEXT // 2)
            drawn.append(
                RecordedRequest(num_prompt, self.output.draw(random_, CONTEXT - num_prompt))
            )
        return tuple(drawn)


TRACES = {
    "sharegpt": Trace("ShareGPT", Spread(161.31, 1.0), Spread(337.99, 0.755)),
    "alpaca": Trace("Alpaca", Spread(19.31, 0.6), Spread(58.45, 0.9)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A workload of requests with a trace's lengths.")
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for each in TRACES[args.trace].requests(args.requests, args.seed):
        counts = (each.num_prompt_tokens, each.num_generated_tokens)
        names = ("num_prompt_tokens", "num_generated_tokens")
        print(json.dumps(dict(zip(names, counts, strict=True))))


if __name__ == "__main__":
    main()
