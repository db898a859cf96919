"""Prints the likeliest tokens of a model in texts; run by OpenVINO's own interpreter.

    python openvino_quality.py --model DIR --texts FILE [--activation-group 32]

FILE has a JSON list of texts, each a list of token ids. Prints one JSON object a text: the
likeliest token at each position but the first, and the log-probability of the token there.
"""

import argparse
import json
from pathlib import Path

import numpy
import openvino  # type: ignore[import-not-found]
from engine import openvino_properties  # type: ignore[import-not-found]  # beside this file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--activation-group", type=int, default=0)
    options = parser.parse_args()
    properties = openvino_properties(2, options.activation_group)
    model = openvino.Core().compile_model(f"{options.model}/openvino_model.xml", "CPU", properties)
    for text in json.loads(options.texts.read_text()):
        inputs = {
            "input_ids": numpy.array([text]),
            "attention_mask": numpy.ones((1, len(text)), dtype=numpy.int64),
            "position_ids": numpy.arange(len(text))[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }
        logits = model.create_infer_request().infer(inputs)["logits"][0, :-1].astype(numpy.float64)
        highest = logits.max(axis=-1)
        total = highest + numpy.log(numpy.exp(logits - highest[:, None]).sum(axis=-1))
        logprobs = logits[numpy.arange(len(text) - 1), text[1:]] - total
        said = {"likeliest": logits.argmax(axis=-1).tolist(), "logprobs": logprobs.tolist()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
