"""What kernels make of fp32 numbers: integers in the same order, and two fp16 parts for the tensor core."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(-9223372036854775808)  # below the key of every score, -inf included


@triton.jit
def _image(score):
    """int32 with the order of fp32. NaN counts as -inf and -0.0 as 0.0."""
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(score, number):
    """int64 in the order of scores, ties to the smaller number (a pid or a centroid, int32, not negative)."""
    return (_image(score).to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _parts(x):
    """fp16 (hi, lo) of fp32 x below 2**15.9: x = hi + lo but for 2**-22 of it or 2**-25."""
    hi = x.to(tl.float16)
    return hi, (x - hi.to(tl.float32)).to(tl.float16)
