"""The shared case table: hard inputs and what MXFP4 makes of them, for every backend.

`golden_cases()` reads `golden/golden_mxfp4.json` (made independently of this code); `hard_tensors()` and
`disagreements()` are those of `mxprobe selftest`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxprobe_kernels.agreement import disagreements as disagreements
from mxprobe_kernels.agreement import hard_tensors as hard_tensors

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Case:
    name: str
    x: torch.Tensor
    """float32, blocks along the last axis."""
    rules: Mapping[str, Mapping[str, Any]]
    """Per scale rule: `exponent`, `q` (NaN where the block is excluded), counts and sums."""


@cache
def golden_cases() -> tuple[Case, ...]:
    cases = json.loads((GOLDEN / "golden_mxfp4.json").read_text())["cases"]
    return tuple(Case(c["name"], _from_bits(c["x_bits"], c["shape"]), c["rules"]) for c in cases)


def _from_bits(words: list[str], shape: list[int]) -> torch.Tensor:
    bits = np.array([int(word, 16) for word in words], dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32).reshape(shape).copy())


def golden_q(expected: Mapping[str, Any]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in expected["q"]])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal float64 bit for bit (so -0 is not 0), any NaN equal to any other."""
    both_nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(np.int64) == b.view(np.int64)) | both_nan).all())
