"""Requests with the lengths of the PagedAttention paper's traces (Kwon et al., SOSP 2023), drawn
from log-normal fits.

    python -m bench.traces sharegpt > FILE      2,000 of them, for `quire advise --workload FILE`

The paper's Figure 11 gives the means, and its Figure 2 the spread of ShareGPT's outputs: requests
with o output tokens hold E[o^2] / (2 E[o]) slots for later tokens, which Orca (Max) needs 13.3 of
91.1 % of 2,048 slots for, so sigma is 0.755. The other spreads are estimates. A request has at most
2,048 tokens, at most half of them in its prompt.
"""

import argparse
import json
import math
import random

CONTEXT = 2048
TRACES = {
    "sharegpt": ((161.31, 1.0), (337.99, 0.755)),
    "alpaca": ((19.31, 0.6), (58.45, 0.9)),
}
"""The mean of the lengths and the sigma of their logarithms: of prompts, of outputs."""


def _draw(chance: random.Random, mean: float, sigma: float, most: int) -> int:
    median = mean / math.exp(sigma**2 / 2)
    return min(max(1, round(chance.lognormvariate(math.log(median), sigma))), most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    prompt, output = TRACES[args.trace]
    for _ in range(args.requests):
        num_prompt = _draw(chance, *prompt, CONTEXT // 2)
        num_generated = _draw(chance, *output, CONTEXT - num_prompt)
        print(json.dumps({"num_prompt_tokens": num_prompt, "num_generated_tokens": num_generated}))


if __name__ == "__main__":
    main()
