"""The arithmetic of draws in Triton: that of `services.engine.sampling.arithmetic`, operation for
operation. The kernels that use it are compiled without `enable_fp_fusion`."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def weights(scaled):
    """floor(2^40 * e^scaled), int64."""
    binary = tl.maximum(scaled, -30.0) * 1.44269504088896341
    shifted = binary + 12582952.0
    rest = binary - (shifted - 12582952.0)
    power = rest * 0.00132647273 + 0.00967151299
    power = power * rest + 0.0555073358
    power = power * rest + 0.240222424
    power = power * rest + 0.693147004
    power = power * rest + 1.0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def exponentials(u):
    """-log(1 - u), fp32."""
    is_small = u < 0.25
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    z = tl.div_rn(tl.where(is_small, u, 1.0 - m), tl.where(is_small, 2.0 - u, 1.0 + m))
    square = z * z
    twice = z + z
    total = square * 0.090909090909090909 + 0.11111111111111111
    total = total * square + 0.14285714285714285
    total = total * square + 0.2
    total = total * square + 0.33333333333333333
    whole = tl.where(is_small, 0.0, -(k.to(tl.float32))) * 0.693147180559945309
    return whole + (twice + twice * (square * total))


@triton.jit
def uniforms(seed, sequence_index, position, i):
    """The i-th random numbers of a draw, as `services.engine.sampling.philox` lays them out."""
    zeros = (i - i).to(tl.uint64)
    c0, c1 = (i >> 3).to(tl.uint64), zeros
    c2 = zeros + sequence_index.to(tl.uint64, bitcast=True)
    c3 = zeros + position.to(tl.uint64, bitcast=True)
    key0, key1 = zeros + seed.to(tl.uint64, bitcast=True), zeros
    multiplier0, multiplier1 = zeros + 0xD2E7470EE14C6C93, zeros + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, multiplier0), c0 * multiplier0
        high1, low1 = tl.umulhi(c2, multiplier1), c2 * multiplier1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += 0x9E3779B97F4A7C15
        key1 += 0xBB67AE8584CAA73B
    word = (i >> 1) & 3
    output = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    half = tl.where((i & 1) == 0, output & 0xFFFFFFFF, output >> 32).to(tl.uint32)
    number = (half.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(number, 0.99999994039535522)


@triton.jit
def key(scaled):
    return 0x7FFFFFFF - (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def times(exponentials, weights):
    """When tokens or chunks of these weights finish. Those of weight 0 never do."""
    times = tl.div_rn(exponentials, tl.maximum(weights, 1).to(tl.float32))
    return tl.where(weights > 0, times, INFINITY)


@triton.jit
def penalized(values, count, repetition, frequency, presence):
    """As `services.engine.sampling.adjustment`; a count of 0: the token is in the prompt only."""
    scaled = tl.where(
        values > 0, tl.div_rn(values, repetition + tl.zeros_like(values)), values * repetition
    )
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    scaled = scaled - frequency * count
    return tl.where(count > 0, scaled - presence, scaled)
