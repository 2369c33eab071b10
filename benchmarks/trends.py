"""False alarms, power and coverage of `mxprobe.attribution.trends` on AR(1) noise. Prints the table that docs quote.

python benchmarks/trends.py [--draws 2000]
"""

import argparse
import math

import numpy as np
import numpy.typing as npt

from mxprobe.attribution.trends import find_step, level, mann_kendall

PHIS = (0.0, 0.3, 0.6, 0.8)
N = 120


def ar1(phi: float, draws: int, n: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """[draws, n] of unit variance, stationary from the start."""
    noise = generator.standard_normal((draws, n))
    noise[:, 1:] *= math.sqrt(1 - phi**2)
    for t in range(1, n):
        noise[:, t] += phi * noise[:, t - 1]
    return noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2_000)
    draws = parser.parse_args().draws
    generator = np.random.default_rng(0)
    position = np.arange(N)
    print(f"{draws} draws of {N} points; ramps of 2 sd over the series, steps of 2 sd in its middle")
    print("phi   trend .05  trend .01  ramp found   step .05  step found")
    for phi in PHIS:
        noise = ar1(phi, draws, N, generator)
        trend = np.array([found.p for row in noise if (found := mann_kendall(row))])
        ramp = np.array([found.p for row in noise if (found := mann_kendall(row + 2 * position / N))])
        step = np.array([found.p for row in noise if (found := find_step(row, n_resamples=199))])
        moved = np.array(
            [found.p for row in noise if (found := find_step(row - 2 * (position >= N // 2), n_resamples=199))]
        )
        print(
            f"{phi:.1f}   {np.mean(trend < 0.05):9.3f}  {np.mean(trend < 0.01):9.3f}  {np.mean(ramp < 0.01):10.2f}   "
            f"{np.mean(step <= 0.05):8.3f}  {np.mean(moved <= 0.05):10.2f}"
        )
    print("\ncoverage of the 95 % interval of a level")
    print("phi   " + "  ".join(f"n = {n:3d}" for n in (12, 24, 60, 120)))
    for phi in PHIS:
        shares = [
            np.mean([(found := level(row)).low <= 0 <= found.high for row in ar1(phi, draws, n, generator)])
            for n in (12, 24, 60, 120)
        ]
        print(f"{phi:.1f}   " + "  ".join(f"{share:7.3f}" for share in shares))


if __name__ == "__main__":
    main()
