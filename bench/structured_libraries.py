"""Compares libraries for structured output: which schemas they take, the cost of compiling and of
masks.

    pip download --no-deps --no-binary :all: jsonschema  # its archive has JSON Schema's test suite
    pip download --no-deps dashscope                     # its archive has Qwen's vocabulary
    pip install xgrammar                                 # without it, llguidance alone is measured
    python -m bench.structured_libraries json/tests/draft2020-12 dashscope/resources/qwen.tiktoken

Each library runs in a process of its own. A walk draws tokens of the mask, all alike, up to 100.
"""

import argparse
import base64
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

VOCAB_SIZE, END = 151_936, 151_645
_SPECIAL = {151_643: b"<|endoftext|>", 151_644: b"<|im_start|>", END: b"<|im_end|>"}
_WALKS, _STEPS = 2, 100
Mask = np.ndarray[tuple[int], np.dtype[np.int32]]


class Matcher(Protocol):
    def fill(self, mask: Mask) -> None: ...
    def accept(self, token: int) -> bool: ...


Compile = Callable[[str], Callable[[], Matcher]]
"""Compiles a schema; the result makes matchers. Raises ValueError if it is not supported."""


def _tokens(path: Path) -> list[bytes]:
    tokens = [b""] * VOCAB_SIZE
    for line in path.read_bytes().splitlines():
        text, number = line.split()
        tokens[int(number)] = base64.b64decode(text)
    for token_id, name in _SPECIAL.items():
        tokens[token_id] = name
    return tokens


def llguidance(tokens: Sequence[bytes]) -> Compile:
    from llguidance import LLMatcher, LLTokenizer

    class Wrapper:
        is_tokenizer_wrapper = True

        def __init__(self) -> None:
            self.eos_token_id, self.bos_token_id = END, None
            self.tokens, self.special_token_ids = tokens, list(_SPECIAL)
            self._ids = {bytes([b]): i for i, t in enumerate(tokens) if len(t) == 1 for b in t}

        def __call__(self, text: str | bytes) -> list[int]:
            raw = text.encode() if isinstance(text, str) else text
            return [self._ids[bytes([b])] for b in raw]

    vocabulary: Any = LLTokenizer(Wrapper(), n_vocab=VOCAB_SIZE, eos_token=[END])  # type: ignore[arg-type]

    class One:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def fill(self, mask: Mask) -> None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

        def accept(self, token: int) -> bool:
            return bool(self._matcher.consume_token(token))

    def compile_schema(schema: str) -> Callable[[], Matcher]:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: One(matcher.deep_copy())

    return compile_schema


def xgrammar(tokens: Sequence[bytes]) -> Compile:
    import torch
    import xgrammar as xgr  # type: ignore[import-not-found,unused-ignore]

    info = xgr.TokenizerInfo(
        list(tokens), xgr.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[END]
    )
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class One:
        def __init__(self, compiled: Any) -> None:
            self._matcher = xgr.GrammarMatcher(compiled)

        def fill(self, mask: Mask) -> None:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask).unsqueeze(0))

        def accept(self, token: int) -> bool:
            return bool(self._matcher.accept_token(token))

    def compile_schema(schema: str) -> Callable[[], Matcher]:
        try:
            compiled = compiler.compile_json_schema(schema, strict_mode=False)
        except Exception as error:
            raise ValueError(str(error)) from error
        return lambda: One(compiled)

    return compile_schema


def _bits(mask: Mask) -> np.ndarray[Any, Any]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _accepts(matcher: Matcher, text: bytes, ids: dict[bytes, int]) -> bool:
    mask = np.zeros(VOCAB_SIZE // 32, np.int32)
    for byte in text:
        token = ids[bytes([byte])]
        matcher.fill(mask)
        if not mask[token // 32] >> token % 32 & 1 or not matcher.accept(token):
            return False
    matcher.fill(mask)
    return bool(mask[END // 32] >> END % 32 & 1)


def measure(name: str, suite: Path, vocabulary: Path) -> None:
    tokens = _tokens(vocabulary)
    began, before = time.perf_counter(), _rss_mb()
    compile_schema = {"llguidance": llguidance, "xgrammar": xgrammar}[name](tokens)
    print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    ids = {token: i for i, token in enumerate(tokens) if len(token) == 1}
    compiling, masking = [], []
    counts = dict.fromkeys(("schemas", "taken", "valid", "valid_taken", "invalid", "wrong"), 0)
    random = np.random.default_rng(0)
    mask = np.zeros(VOCAB_SIZE // 32, np.int32)
    for case in _cases(suite):
        counts["schemas"] += 1
        start = time.perf_counter()
        try:
            new = compile_schema(json.dumps(case["schema"]))
        except ValueError:
            continue
        compiling.append(time.perf_counter() - start)
        counts["taken"] += 1
        for test in case["tests"]:
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            if _accepts(new(), json.dumps(test["data"], ensure_ascii=False).encode(), ids):
                counts["valid_taken" if test["valid"] else "wrong"] += 1
        for _ in range(_WALKS):
            matcher = new()
            for _ in range(_STEPS):
                start = time.perf_counter()
                matcher.fill(mask)
                masking.append(time.perf_counter() - start)
                token = int(random.choice(_bits(mask)))
                if token == END or not matcher.accept(token):
                    break
    compile_ms = 1e3 * np.percentile(compiling, [50, 99, 100])
    mask_us = 1e6 * np.percentile(masking, [50, 99, 100])
    print(counts)
    print("compile ms p50 {:.2f}, p99 {:.1f}, most {:.1f}".format(*compile_ms))
    print("mask us    p50 {:.1f}, p99 {:.0f}, most {:.0f}".format(*mask_us), f"of {len(masking)}")
    print(f"memory     {_rss_mb() - before:.0f} MB more than before", flush=True)


def _cases(suite: Path) -> list[Any]:
    return [
        case
        for path in sorted(suite.glob("*.json"))
        for case in json.loads(path.read_text())
        if isinstance(case["schema"], dict)
    ]


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--library", choices=["llguidance", "xgrammar"])
    asked = parser.parse_args()
    if asked.library:
        measure(asked.library, asked.suite, asked.vocabulary)
        return
    for name in ("llguidance", "xgrammar"):
        if find_spec(name):
            command = [sys.executable, "-m", "bench.structured_libraries", *sys.argv[1:]]
            subprocess.run([*command, "--library", name], check=True, env=dict(os.environ))


if __name__ == "__main__":
    main()
