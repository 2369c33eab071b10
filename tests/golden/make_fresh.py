"""Write golden_fresh.json: hard inputs under fresh seeds, and what the float64 reference makes of them.

    python tests/golden/make_fresh.py [--seed N]

Without --seed one is drawn from the operating system. The reference (numpy, `mxprobe_kernels.reference`) shares no
arithmetic with the backends: it compares numbers that are exact, where they round.
"""

import argparse
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mxprobe_kernels import reference
from mxprobe_kernels.formats import Rule

FRESH = Path(__file__).with_name("golden_fresh.json")
_BOUNDARIES = np.array([1, 3, 5, 7, 10, 14, 20]) / 4


def inputs(g: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Named float32 [R, K], blocks along K."""
    shape = (4, 96)
    normal = g.standard_normal
    yield "gauss", normal(shape)
    yield "laplace", g.laplace(size=shape)
    yield "t2", g.standard_t(2, shape)
    yield "bf16", _as_bf16(normal(shape) * np.exp2(g.integers(-20, 20, (4, 1))))
    yield "fp16", normal(shape).astype(np.float16)
    yield "ragged", normal((5, 77))
    yield "narrow", normal((9, 3))
    yield "sparse", normal(shape) * (g.random(shape) < 0.1)
    yield "scales far apart", normal(shape) * np.exp2(np.repeat(g.integers(-140, 120, (4, 3)), 32, axis=1))
    yield "log-uniform", np.exp2(g.uniform(-12, 3, shape)) * g.choice([-1, 1], shape)
    yield "one outlier a block", np.where(np.arange(96) % 32 == g.integers(32), 60.0, 1.0) * normal(shape)
    on_ties = g.choice(_BOUNDARIES, shape)
    on_ties[:, ::32] = 6
    yield "on the ties of s", on_ties * np.exp2(g.integers(-9, 9, (4, 1)))
    amax = np.repeat(g.uniform(3, 6, (4, 3)), 32, axis=1).astype(np.float32)
    beside = (g.choice(_BOUNDARIES, shape) * amax.astype(np.float64) / 6).astype(np.float32)
    beside = np.nextafter(beside, np.where(g.random(shape) < 0.5, np.float32(0), np.float32(9)))
    beside[:, ::32] = amax[:, ::32]
    yield "beside the ties of s*", beside
    yield "subnormal", normal(shape) * 1e-39
    holes = normal(shape)
    holes[0, 5], holes[1, 40], holes[2] = np.nan, np.inf, 0
    yield "non-finite", holes


def _as_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def case(name: str, x: np.ndarray) -> dict[str, Any]:
    x = np.ascontiguousarray(x, np.float32)
    rules: dict[str, Any] = {}
    for rule in Rule:
        found = reference.decompose(x, rule=rule)
        values = {key: float(v) if isinstance(v, np.floating) else v for key, v in found.values.items()}
        rules[rule.value] = {**values, "exponent": found.exponent.reshape(-1).tolist()}
    bits = [f"{word:08x}" for word in x.view(np.uint32).reshape(-1)]
    return {"name": name, "shape": list(x.shape), "x_bits": bits, "rules": rules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    seed = parser.parse_args().seed
    cases = [case(name, x) for name, x in inputs(np.random.default_rng(seed))]
    FRESH.write_text(json.dumps({"seed": seed, "cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
