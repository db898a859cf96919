"""The arithmetic of draws in Triton: a draw's tokens follow from its logits, parameters and random
numbers alone, on one kind of GPU. Another kind of device draws other tokens from the same seed."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def weights(scaled):
    """floor(2^40 * e^scaled), int64: a sum of whole numbers does not depend on its order."""
    return (tl.exp(tl.maximum(scaled, -30.0)) * 1099511627776.0).to(tl.int64)


@triton.jit
def uniforms(seed, sequence_index, position, i):
    """The i-th random numbers of a draw, in (0, 1)."""
    zeros = i - i
    index, place = zeros + sequence_index.to(tl.int32), zeros + position.to(tl.int32)
    words, _, _, _ = tl.philox(seed, i, index, place, zeros)
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)


@triton.jit
def key(scaled):
    return 0x7FFFFFFF - (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def times(numbers, weights):
    """When tokens or chunks of these weights finish, by uniform numbers. Those of weight 0 never
    do."""
    times = -tl.log(numbers) / tl.maximum(weights, 1).to(tl.float32)
    return tl.where(weights > 0, times, INFINITY)


@triton.jit
def penalized(values, count, repetition, frequency, presence):
    """As `services.engine.sampling.adjustment`; a count of 0: the token is in the prompt only."""
    scaled = tl.where(values > 0, values / repetition, values * repetition)
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    scaled = scaled - frequency * count
    return tl.where(count > 0, scaled - presence, scaled)
