"""Log-probabilities and entropies from whatever a model returns.

B = samples, T = positions, V = vocabulary, n = counted tokens.

A root returns logits [B, T, V] (bare, as `.logits`, under the key "logits", or first in a tuple) or, with a fused
loss, the log-probabilities [B, T] of the tokens it was given (`.log_probs`, `.logprobs`). Anything else is no policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

LOGITS = ("logits",)
LOG_PROBS = ("log_probs", "logprobs", "per_token_logps", "logps")
ENTROPY = ("entropy", "entropies")
TOKEN_ARGUMENT = "input_ids"


class PolicyOutput(NamedTuple):
    """The policy in a root's return value: exactly one of logits and log_probs is there."""

    logits: torch.Tensor | None
    """[B, T, V]"""
    log_probs: torch.Tensor | None
    """[B, T], of the tokens the model was given."""
    entropy: torch.Tensor | None
    """[B, T], beside log_probs; with logits it is computed from them."""
    label_mask: torch.Tensor | None
    """[B, T] bool: the positions that were scored, where the model says so."""
    loss: torch.Tensor | None
    """The model's own loss, where it returns one."""

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.logits if self.logits is not None else self.log_probs
        assert tensor is not None  # one of them is there
        return tensor

    def counted(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Return float32 [B, T]: 1 where the position counts, by the model's own mask or else by `mask`."""
        read = mask if self.label_mask is None else self.label_mask
        return torch.ones(self.tensor.shape[:2], device=self.tensor.device) if read is None else read.float()

    def detached(self) -> PolicyOutput:
        """Return the same values without the graph that made them."""
        return PolicyOutput(*(None if value is None else value.detach() for value in self))


class PolicyGradient(NamedTuple):
    """Gradient of the run's loss at what its model returned, the shapes of `PolicyOutput`'s tensors.

    What a loss reads besides (a value head, a router's balance) is not followed.
    """

    tensor: torch.Tensor | None
    """The gradient by logits or log_probs."""
    entropy: torch.Tensor | None

    def pairs(self, policy: PolicyOutput) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs of a replay and the gradients to run back from them."""
        places = ((policy.tensor, self.tensor), (policy.entropy, self.entropy))
        both = [(y, g) for y, g in places if y is not None and g is not None and y.requires_grad]
        return [y for y, _ in both], [g.to(y.dtype) for y, g in both]


def find_policy(output: Any) -> PolicyOutput | None:
    """Return the policy in a root's return value, or None. Log-probabilities come first: the loss is made of them."""
    loss = _named(output, ("loss",), 0)
    log_probs = _named(output, LOG_PROBS, 2)
    if log_probs is not None:
        mask = _named(output, ("label_mask",), 2)
        return PolicyOutput(None, log_probs, _named(output, ENTROPY, 2), mask, loss)
    logits = output if isinstance(output, torch.Tensor) else _named(output, LOGITS, 3)
    if logits is None and isinstance(output, (tuple, list)):
        logits = next((item for item in output if isinstance(item, torch.Tensor) and item.dim() == 3), None)
    if logits is None or logits.dim() != 3 or logits.shape[-1] < 2 or not logits.is_floating_point():
        return None
    return PolicyOutput(logits, None, None, None, loss)


def _named(output: Any, names: tuple[str, ...], dim: int) -> torch.Tensor | None:
    if isinstance(output, (torch.Tensor, tuple, list)) and not hasattr(output, "_fields"):
        return None
    for name in names:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor) and value.dim() == dim:
            return value
    return None


def given_tokens(ids: Any, shape: torch.Size) -> torch.Tensor | None:
    """Return [B, T] the token that follows each position of logits [B, T, V], -1 where none does; None if not known.

    ids: the model's argument `input_ids`, [B, L]. By the convention of causal language models the logits are those
    of its last T positions.
    """
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != shape[0] or ids.shape[1] < shape[1]:
        return None
    if ids.is_floating_point():
        return None
    following = ids[:, ids.shape[1] - shape[1] + 1 :]
    return torch.cat((following, following.new_full((shape[0], 1), -1)), 1)


def draw_tokens(log_probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw [B, T], one token a position, from log-probabilities [B, T, V] of the model's own distribution.

    By the Gumbel trick and a private generator: the global random state belongs to the run.
    """
    uniform = torch.rand(log_probs.shape, generator=generator, device=log_probs.device)
    return (log_probs.detach() - torch.log(-torch.log(uniform.clamp(1e-20, 1.0 - 1e-7)))).argmax(-1)


def chosen(log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, T] the log-probability of each token [B, T], out of [B, T, V]; of token 0 where it is -1."""
    return log_probs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy [B, T] of log-probabilities [B, T, V]."""
    return -(log_probs.exp() * log_probs).sum(-1)
