"""Do generation and training send the same token to the same experts?"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe.schema import Row


class Flips(NamedTuple):
    """Of each router: [S, n] experts that differ, and those per token; `found` bool [S]."""

    differing: dict[str, torch.Tensor]
    top_k: dict[str, int]
    found: torch.Tensor

    @property
    def anywhere(self) -> torch.Tensor:
        """bool [S, n]: any router chose otherwise."""
        return torch.stack([each > 0 for each in self.differing.values()]).any(0)

    def rows(self, counted: torch.Tensor) -> list[Row]:
        """Rows of table `routing_flips` without when; `counted` bool [S, n] on the CPU: the tokens that are there."""
        rows: list[Row] = []
        for name, differing in self.differing.items():
            n = differing.cpu()[counted]
            sums = {"n_tokens": len(n), "n_flipped": int((n > 0).sum()), "n_slots": int(n.sum())}
            rows.append({"module": name, "top_k": self.top_k[name], **sums})
        return rows
