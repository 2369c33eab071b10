"""Faults of other kinds in recorded runs of the small language model, one run each: what the verdict says of them.

    python benchmarks/planted_others.py [NAME ...] [--seed 2001]

No answer is counted right or wrong here: the table is for reading. Ten minutes on one idle core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import mxprobe_kernels
from mxprobe.attribution import Thresholds, recommend
from mxprobe.trace import open_trace
from tests.planted_lm import mxfp4, nearest_code, write_planted

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Weight = torch.Tensor
REST = {"kind_elsewhere": "natural", "elsewhere": mxfp4}
"""The other layers are MXFP4 of natural weights."""


def scaled(w: Weight) -> tuple[Weight, Weight]:
    """Blocks [O, N, 32] and the exponents of their `rceil` scales [O, N, 1]."""
    blocks = w.reshape(w.shape[0], -1, 32)
    return blocks, torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 6.0))


def cut_off(w: Weight) -> Weight:
    blocks, exponent = scaled(w)
    s = 2.0**exponent
    code = torch.bucketize((blocks / s).abs().clamp(max=6.0), GRID, right=True) - 1
    return (torch.sign(blocks) * GRID[code] * s).reshape(w.shape)


def clipped_scale(w: Weight) -> Weight:
    """No scale above the 60 % quantile of them."""
    blocks, exponent = scaled(w)
    s = 2.0 ** torch.minimum(exponent, exponent.flatten().quantile(0.6).floor())
    return (nearest_code((blocks / s).clamp(-6.0, 6.0)) * s).reshape(w.shape)


def flushed(w: Weight) -> Weight:
    """Blocks with the smallest quarter of scales become 0."""
    blocks, exponent = scaled(w)
    s = 2.0**exponent
    small = exponent <= exponent.flatten().quantile(0.25)
    return torch.where(small, torch.zeros(()), nearest_code(blocks / s) * s).reshape(w.shape)


def under_old_scales(w: Weight) -> Weight:
    """Scales of weights that were half as large in half of the blocks: what has grown since is cut off at 6."""
    blocks, exponent = scaled(w)
    grown = torch.rand(exponent.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    s = 2.0 ** (exponent - grown.float())
    return (nearest_code((blocks / s).clamp(-6.0, 6.0)) * s).reshape(w.shape)


def noisy(sigma: float, then: Callable[[Weight], Weight] = torch.clone) -> Callable[[Weight], Weight]:
    def add(w: Weight) -> Weight:
        generator = torch.Generator().manual_seed(int(w.abs().sum() * 1e3) % 10**6)
        return then(w + sigma * w.std() * torch.randn(w.shape, generator=generator))

    return add


def by(**how: Any) -> Callable[[Weight], Weight]:
    return lambda w: mxprobe_kernels.quantize_dequantize(w, **how)[0]


def transposed(w: Weight) -> Weight:
    return w.T.contiguous() if w.shape[0] == w.shape[1] else w.flip(0)


PLANTS: dict[str, dict[str, Any]] = {
    "nothing: MXFP4 weights": {},
    "MXFP4 inputs and weights": {"rollout_x": mxfp4},
    "MXFP4 inputs alone": {"rollout": torch.clone, "rollout_x": mxfp4},
    "codes cut off": {"rollout": cut_off},
    "codes cut off, half of the layers": {"rollout": cut_off, "extent": "half", **REST},
    "codes cut off, one layer": {"rollout": cut_off, "extent": "one", **REST},
    "scales clipped": {"rollout": clipped_scale},
    "scales clipped, trainer MXFP4": {"rollout": clipped_scale, "train": mxfp4},
    "small blocks flushed": {"rollout": flushed},
    "rule even, trainer rceil": {"rollout": by(rule="even"), "train": mxfp4},
    "rule even, trainer rceil, half of the layers": {
        "rollout": by(rule="even"),
        "train": mxfp4,
        "extent": "half",
        **REST,
    },
    "noise of .1 sd": {"rollout": noisy(0.1)},
    "noise of .05 sd, then MXFP4": {"rollout": noisy(0.05, mxfp4)},
    "noise of .01 sd, then MXFP4": {"rollout": noisy(0.01, mxfp4)},
    "noise of .05 sd, trainer MXFP4": {"rollout": noisy(0.05, mxfp4), "train": mxfp4},
    "INT4 groups": {"rollout": by(format="int4_group")},
    "weights of zero, one layer": {"rollout": torch.zeros_like, "extent": "one", **REST},
    "transposed, one layer": {"rollout": transposed, "extent": "one", **REST},
    "scale, one layer": {"kind": "scale", "extent": "one"},
    "deadzone, one layer": {"kind": "deadzone", "extent": "one"},
    "scale, and weights of the first step": {"kind": "stale_scale"},
    "scale, and weights of the first step, half of the layers": {"kind": "stale_scale", "extent": "half"},
    "block scales of older weights": {"rollout": under_old_scales},
    "block scales of older weights, half of the layers": {"rollout": under_old_scales, "extent": "half", **REST},
    "MXFP4 on both sides, scale in the gradients": {"train": mxfp4, "gradient": "scale"},
    "deadzone in half, grid in half": {"kind": "deadzone", "extent": "half", "kind_elsewhere": "grid"},
    "scale in half, grid in half": {"kind": "scale", "extent": "half", "kind_elsewhere": "grid"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=2001)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| in the rollout | verdict | component, first correction | modules named | says |\n|---|---|---|---|---|")
    for name in arguments.names or PLANTS:
        how = {"kind": "natural", **PLANTS[name]}
        with tempfile.TemporaryDirectory() as directory:
            trace, _ = write_planted(Path(directory) / "t", how.pop("kind"), seed=arguments.seed, **how)
            answer = recommend(open_trace(trace), Thresholds().replace(n_resamples=10))
        named = len({module for group in answer.where for module in group.modules})
        what = f"{answer.component}, {answer.chosen[0] if answer.chosen else 'none'}"
        print(f"| {name} | {answer.plain_words} | {what} | {named} | {answer.headline[:90]} |", flush=True)


if __name__ == "__main__":
    main()
