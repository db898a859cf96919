"""2,000 requests with the lengths of the PagedAttention paper's ShareGPT trace (Kwon et al., SOSP
2023), drawn from log-normal fits: `python -m bench.traces > FILE`, for `quire advise --workload`.

The paper's Figure 11 gives the means, and its Figure 2 the spread of outputs: requests with o
output tokens hold E[o^2] / (2 E[o]) slots for later tokens, which Orca (Max) needs 13.3 of 91.1 %
of 2,048 slots for, so sigma is 0.755. The spread of prompts is an estimate. A request has at most
2,048 tokens, at most half of them in its prompt.
"""

import json
import math
import random

CONTEXT = 2048
PROMPT, OUTPUT = (161.31, 1.0), (337.99, 0.755)
"""The mean of the lengths, and the sigma of their logarithms."""


def _draw(chance: random.Random, mean: float, sigma: float, most: int) -> int:
    median = mean / math.exp(sigma**2 / 2)
    return min(max(1, round(chance.lognormvariate(math.log(median), sigma))), most)


def main() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        num_prompt = _draw(chance, *PROMPT, CONTEXT // 2)
        num_generated = _draw(chance, *OUTPUT, CONTEXT - num_prompt)
        print(json.dumps({"num_prompt_tokens": num_prompt, "num_generated_tokens": num_generated}))


if __name__ == "__main__":
    main()
