"""Measured costs of steps and of calls: the 0.6B shape in bf16 on an AMD EPYC with AVX-512
(docs/benchmarks/decode.md), and the CPU time of Valkey for a call on a pool of 100,000 blocks
(docs/benchmarks/store-and-recovery.md)."""

from bisect import bisect_left

PREFILL_TOKENS_PER_S = 691.0  # of a prompt of 2,048 tokens
_DECODE_TOKENS_PER_S = ((1, 34.3), (8, 219.0), (16, 387.0), (32, 485.0), (64, 484.0))
_STEPS_S = [(rows, rows / speed) for rows, speed in _DECODE_TOKENS_PER_S]
CALL_US = {"allocate": 254, "extend": 97, "commit": 79, "release": 107, "other": 80}


def decode_step_s(num_rows: int) -> float:
    """The duration of a step, by linear interpolation; in proportion above the last measured
    number of rows."""
    if num_rows > _STEPS_S[-1][0]:
        return _STEPS_S[-1][1] * num_rows / _STEPS_S[-1][0]
    at = bisect_left([rows for rows, _ in _STEPS_S], num_rows)
    high_rows, high_s = _STEPS_S[at]
    if high_rows == num_rows:
        return high_s
    low_rows, low_s = _STEPS_S[at - 1]
    return low_s + (high_s - low_s) * (num_rows - low_rows) / (high_rows - low_rows)
