"""`python -m tools.embedded_model`: makes the embedded model anew, and measures it.

The corpus, the seed and the recipe decide the result, up to the rounding of the machine.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tools.embedded_model.corpus import load
from tools.embedded_model.evaluate import evaluate
from tools.embedded_model.train import Recipe, train
from tools.embedded_model.train_tokenizer import train_tokenizer

EMBEDDED = Path(__file__).parents[2] / "quire" / "embedded"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.embedded_model", description=__doc__)
    parser.add_argument("--output", type=Path, default=EMBEDDED, help="folder of the checkpoint")
    parser.add_argument("--evaluate-only", action="store_true", help="measure what is there")
    parser.add_argument("--questions", type=int, default=1, help="measured questions per fact")
    arguments = parser.parse_args()

    corpus = load()
    if not arguments.evaluate_only:
        recipe = Recipe()
        arguments.output.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(corpus, recipe.vocab_size, recipe.max_length, arguments.output)
        train(corpus, tokenizer, recipe, arguments.output)
    scores = evaluate(corpus, arguments.output, arguments.questions)
    print(json.dumps({name: asdict(score) for name, score in scores.items()}, indent=2))


if __name__ == "__main__":
    main()
