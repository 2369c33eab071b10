"""Do generation and training send the same token to the same experts?"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mxprobe.schema import Row


class Flips(NamedTuple):
    """How many experts [S, n] differ for each router, and how many a token has; `found` bool [S]."""

    differing: dict[str, torch.Tensor]
    top_k: dict[str, int]
    found: torch.Tensor

    @property
    def anywhere(self) -> torch.Tensor:
        """Return bool [S, n]: any router chose otherwise."""
        return torch.stack([each > 0 for each in self.differing.values()]).any(0)

    def rows(self, counted: torch.Tensor) -> list[Row]:
        """Return rows of table `routing_flips` without when; `counted` bool [S, n] on the CPU: the tokens there are."""
        rows: list[Row] = []
        for name, differing in self.differing.items():
            n = differing.cpu()[counted]
            sums = {"n_tokens": len(n), "n_flipped": int((n > 0).sum()), "n_slots": int(n.sum())}
            rows.append({"module": name, "top_k": self.top_k[name], **sums})
        return rows
