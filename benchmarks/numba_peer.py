"""The decomposition's sums as numba makes them: one pass, a row a thread, for `benchmarks/kernels.py`.

    pip install numba

Most sums of the `rceil` decomposition and two counts, in float32 by blocks and float64 across them, with or without its
two histograms: what a user would write by hand who wants the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

FAST = {"reassoc", "contract", "nsz", "nnan", "ninf"}
"""All but reciprocals for divisions and approximate functions: with those (`fastmath=True`) sums are 0.2 % off, for a
tenth more speed. Without `nnan` and `ninf` no loop becomes vectors, and a quarter of the speed is left."""


def statistics(histograms: bool) -> Callable[[torch.Tensor], object] | None:
    """Of bfloat16 or float32 [R, K], K a multiple of 32; None where numba is not installed."""
    try:
        import numba
    except ImportError:
        return None
    f32, i32 = np.float32, np.int32

    @numba.njit(fastmath=FAST, inline="always")
    def rounded(z):
        step = f32(0.5)
        if z >= f32(2):
            step = f32(1)
        if z >= f32(4):
            step = f32(2)
        return np.rint(z / step) * step

    @numba.njit(fastmath=FAST, parallel=True)
    def run(words, shift, parts):
        n_rows, n_columns = words.shape
        for r in numba.prange(n_rows):
            total = np.zeros(13 + 48)
            codes = np.empty(32, np.int32)
            block = np.empty(32, np.float32)
            for first in range(0, n_columns, 32):
                top = i32(0)
                for j in range(32):
                    bits = i32(i32(words[r, first + j]) << shift)
                    top = max(top, bits & i32(0x7FFFFFFF))
                    block[j] = bits.view(np.float32)
                amax = i32(top).view(np.float32)
                exponent = max(((top + i32(0x3FFFFF)) >> i32(23)) - i32(2), i32(1))
                scale = i32(exponent << i32(23)).view(np.float32)
                inverse = i32((i32(254) - exponent) << i32(23)).view(np.float32)
                ideal = amax / f32(6) if top > 0 else f32(1)
                x2 = e2 = b2 = d2 = g2 = bg = xq = xs = z2 = se = f32(0)
                dead = zeroed = i32(0)
                for j in range(32):
                    x = block[j]
                    a = abs(x)
                    q = rounded(a * inverse) * scale
                    c_star = rounded(a / ideal)
                    star = c_star * ideal
                    e, b, g = q - a, q - star, star - a
                    x2 += a * a
                    e2 += e * e
                    b2 += b * b
                    xq += a * q
                    xs += a * star
                    se += e if x > 0 else -e
                    on_d = c_star == 0
                    d2 += g * g if on_d else f32(0)
                    g2 += f32(0) if on_d else g * g
                    bg += f32(0) if on_d else b * g
                    dead += i32(on_d and a > 0)
                    zero = q == 0
                    z2 += a * a if zero else f32(0)
                    zeroed += i32(zero and a > 0)
                if histograms:
                    for j in range(32):
                        c = rounded(abs(block[j]) * inverse)
                        codes[j] = i32(min(min(c * f32(2), c + f32(2)), c * f32(0.5) + f32(4)))
                        codes[j] += i32(8) if block[j] < 0 else i32(0)
                    for j in range(32):
                        total[13 + codes[j]] += 1
                    if top > 0:
                        total[29 + min(int(np.log2(scale / ideal) * 32), 31)] += 1
                sums = (x2, e2, b2, d2, g2, bg, xq, xs, se, z2)
                for k in range(10):
                    total[k] += sums[k]
                total[10] += dead
                total[11] += zeroed
                total[12] = max(total[12], amax)
            parts[r] = total

    def measure(x: torch.Tensor) -> np.ndarray:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        wide = x.dtype == torch.float32
        words = x.view(torch.int32 if wide else torch.int16).numpy()
        parts = np.zeros((x.shape[0], 13 + 48))
        run(words, i32(0 if wide else 16), parts)
        return parts.sum(0)

    return measure
