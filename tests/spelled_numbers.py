"""Values on which the Python and the JavaScript spelling of numbers are compared."""

import random
from pathlib import Path

from mxprobe.numbers import number, percent

SCRIPT = Path(__file__).resolve().parents[1] / "reports/mxprobe_reports/assets/numbers.js"
SPELL = "values => values.map(x => [number(x), percent(x)])"


def values(n: int = 10_000) -> list[float]:
    """Every magnitude, ties of both bases, and the neighbours of each boundary; seeded."""
    rng = random.Random(0)
    found = [
        sign * m * 10.0**e for e in range(-12, 12) for m in (0.995, 0.9995, 1.0, 1.005, 9.96, 9.995) for sign in (1, -1)
    ]
    found += [0.0, -0.0, 5e-324, 1.7e308, 0.00005, 0.00996, 0.3125, 999_999.7, 1e22, 9.96e-4, 3.0]
    found += [rng.randint(-4000, 4000) / 2 ** rng.randint(1, 12) for _ in range(3000)]
    found += [round(rng.uniform(-1, 1), rng.randint(1, 6)) * 10 ** rng.randint(-6, 8) for _ in range(3000)]
    while len(found) < n:
        found.append(rng.choice((-1, 1)) * rng.uniform(1, 10) * 10.0 ** rng.randint(-30, 30))
    return found


def spelled(numbers: list[float]) -> list[list[str]]:
    return [[number(x), percent(x)] for x in numbers]
