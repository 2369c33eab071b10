"""Where a framework keeps what torch keeps in the parameter: the gradient and the copy that the optimizer steps.

Megatron-Core 0.16.1 adds the weight gradient to `param.main_grad` inside the GEMM (`.grad` is then a dummy), and
its optimizers step `param.main_param`, an fp32 copy or this rank's shard of it, in place of the parameter.
"""

from __future__ import annotations

from typing import Any

import torch


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the optimizer will use: `main_grad` where there is one, else `.grad`."""
    main: Any = getattr(parameter, "main_grad", None)
    return main if isinstance(main, torch.Tensor) else parameter.grad


def is_stepped_by(parameter: torch.Tensor, owned: set[int]) -> bool:
    """Say whether the parameter, or its copy, is among the ids of those that an optimizer owns."""
    main: Any = getattr(parameter, "main_param", None)
    return id(parameter) in owned or (main is not None and id(main) in owned)
