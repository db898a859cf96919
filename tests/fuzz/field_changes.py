"""Wrong values for every field of a hostile worker's messages."""

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.forging import HYPOTHESES, SCORES, TABLES, WHOLE, Changes

IDS = [f"r{number}" for number in range(6)]
"""The ids of existing requests."""

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 255, 256, 300, 2**31, 2**32 - 1])
LARGE = NUMBERS | st.sampled_from([2**52 - 1, 2**52, 2**53, 2**64 - 1])
TOKENS = st.lists(st.sampled_from([0, 97, 98, 122, 299, 300, 2**32 - 1]), max_size=10)
BLOCKS = st.lists(NUMBERS, max_size=4)
NAMES = st.sampled_from([*IDS, "", "nobody", "x" * 300])
Fields = dict[str, st.SearchStrategy[Any]]

TICKET: Fields = {
    "request_id": NAMES,
    "attempt": NUMBERS,
    "order": LARGE,
    "holder_id": NAMES,
    "holder_epoch": LARGE,
    "num_cached_tokens": NUMBERS,
    "prefill_ns_per_token": NUMBERS,
    "sequences": st.sampled_from(sorted(WHOLE)),
    "sequences.index": NUMBERS,
    "sequences.1.index": NUMBERS,
    "sequences.token_ids": TOKENS,
    "sequences.1.token_ids": TOKENS,
    "sequences.block_ids": BLOCKS,
    "sequences.1.block_ids": BLOCKS,
    "sequences.num_computed_tokens": NUMBERS,
    "beams.scores": st.lists(SCORES, max_size=5),
    "beams.finished": st.lists(HYPOTHESES, max_size=5),
    "swapped.pool_id": NAMES,
    "swapped.holder_id": NAMES,
    "swapped.holder_epoch": LARGE,
    "swapped.tables": st.sampled_from(TABLES),
    "swapped.tables.index": NUMBERS,
    "swapped.tables.block_ids": BLOCKS,
}
LOGPROB = st.sampled_from([0.0, -1.5, -1e30, 0.5, float("nan"), float("inf"), float("-inf")])
LOGPROBS: Fields = {
    "logprob": LOGPROB,
    "rank": NUMBERS,
    "top_token_ids": TOKENS | st.sampled_from([[97, 300], [97, 97], [97]]),
    "top_logprobs": st.lists(LOGPROB, max_size=4),
}
COLUMNS: Fields = {
    "logprobs": st.lists(LOGPROB, max_size=4),
    "ranks": TOKENS,
    "top_token_ids": TOKENS,
    "top_logprobs": st.lists(LOGPROB, max_size=4),
}
NUMBER_OF = st.sampled_from(["none", "twice", "first", "reversed"])
"""Fields with one entry for each sequence or token."""

OUTPUT: Fields = {
    "request_id": NAMES,
    "attempt": NUMBERS,
    "index": NUMBERS,
    "position": NUMBERS,
    "token_ids": TOKENS,
    "finish_reason": st.sampled_from([0, 1, 2, 3, 99]),
    "score": SCORES,
    "logprobs": NUMBER_OF,
    **{f"logprobs.{name}": values for name, values in LOGPROBS.items()},
}
CODES = ["invalid_request", "kv_corrupt", "queue_full", "nobody's", "", "x" * 5000]


def _of(prefix: str, fields: Fields) -> Fields:
    return {f"{prefix}.{name}": values for name, values in fields.items()}


FIELDS: dict[str, Fields] = {
    "prefilled": _of("ticket", TICKET)
    | _of("outputs", OUTPUT)
    | _of("outputs.1", OUTPUT)
    | _of("prompt_logprobs", LOGPROBS)
    | _of("prompt_logprob_columns", COLUMNS)
    | {"outputs": NUMBER_OF, "prompt_logprobs": NUMBER_OF},
    "requeue": _of("ticket", TICKET) | {"reason": st.sampled_from([0, 1, 2, 3, 4, 99])},
    "step": _of("outputs", OUTPUT) | _of("outputs.1", OUTPUT) | {"outputs": NUMBER_OF},
    "reserved": {"request_id": NAMES, "attempt": NUMBERS, "granted": st.booleans()},
    "began": {"request_id": NAMES, "attempt": NUMBERS},
    "failed": {
        "request_id": NAMES,
        "attempt": NUMBERS,
        "code": st.sampled_from(CODES),
        "message": st.sampled_from(["", "no", "x" * 100_000]),
    },
    "load": {
        "num_running": NUMBERS,
        "num_free_slots": NUMBERS,
        "num_pending_tokens": LARGE,
        "draining": st.booleans(),
    },
}


def _changes(kind: str) -> st.SearchStrategy[Changes]:
    one = st.sampled_from(sorted(FIELDS[kind])).flatmap(
        lambda path: st.tuples(st.just(path), FIELDS[kind][path])
    )
    return st.lists(one, min_size=1, max_size=2).map(tuple)


CHANGES = {kind: _changes(kind) for kind in FIELDS}
