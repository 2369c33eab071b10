"""A small language model that really has learned something, trained in seconds from a fixed seed.

Text is made on the spot: sums such as "37+45=82;" and reversed words "abc>cba;", in one stream of characters. Four
pre-norm transformer blocks of width 64 with separate q, k, v, o, gate, up and down projections.
"""

from __future__ import annotations

import random
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

ALPHABET = "0123456789+=;>abcdefgh"
CONTEXT = 24


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        heads = [project(h).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class SmallLM(nn.Module):
    """input_ids [B, T] -> logits [B, T, V]"""

    def __init__(self, width: int = 64, n_layers: int = 4, n_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The projections inside the blocks, by name: what a recipe quantizes."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"}


def batch(n: int, seed: int) -> torch.Tensor:
    """int64 [n, CONTEXT] characters of fresh text."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(n):
        text = ""
        while len(text) < CONTEXT:
            if rng.random() < 0.5:
                a, b = rng.randrange(50), rng.randrange(50)
                text += f"{a}+{b}={a + b};"
            else:
                word = "".join(rng.choice("abcdefgh") for _ in range(rng.randrange(2, 6)))
                text += f"{word}>{word[::-1]};"
        rows.append([ALPHABET.index(c) for c in text[:CONTEXT]])
    return torch.tensor(rows)


@cache
def trained(steps: int = 160) -> SmallLM:
    """The trained model; once per process, and the global random state is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmallLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1.0 - 0.9 * step / steps)
            ids = batch(24, seed=step)
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    optimizer.zero_grad()
    return model.requires_grad_(True)
