"""Parameters that FSDP2 shards, copied whole while the run itself holds them whole: a replay then asks no other rank.

`fully_shard` gathers a module's parameters before its forward and frees them after it. A replay that gathered again
would have to run on all ranks at one step, and a rank that failed in it would leave the others waiting for ever. So
each rank copies, in the captured forward, what it has been given anyway; for the replay the copies take the place of
the shards, and FSDP's hooks are replaced by the one thing they do to values, the casts of its mixed precision. Nothing
communicates, and each rank replays for itself, or does not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mxprobe.measuring.compat import fsdp_policy
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.replay.refusal import NotReplayableError

MAX_PARAMETER_BYTES = 1 << 32
"""Models whose parameters are larger are not copied."""
FREE_FACTOR = 1.5
"""On a device, so many times the copies must be free beyond all that the process has ever reserved."""
_PARAMETERS, _PRE, _POST = "_parameters", "_forward_pre_hooks", "_forward_hooks"


def is_sharded(module: nn.Module) -> bool:
    """Say whether `fully_shard` has been applied to this very module."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


class WholeParameters:
    """Copies of the parameters below a root, made module by module as its forward goes along."""

    def __init__(self, root: nn.Module) -> None:
        """Raise NotReplayableError where the copies would be too large."""
        self._sharded = [module for module in root.modules() if is_sharded(module)]
        self._managed = {id(module): _managed(module) for module in self._sharded}
        self._copies: dict[tuple[int, str], nn.Parameter] = {}
        self._made: dict[int, nn.Parameter] = {}
        self._check_size()

    def _check_size(self) -> None:
        parameters = {id(p): p for module in self._sharded for p in module.parameters()}.values()
        needed = sum(p.numel() * p.element_size() for p in parameters)
        if needed > MAX_PARAMETER_BYTES:
            raise NotReplayableError(
                f"its {needed >> 20} MiB of sharded parameters would be copied whole; at most "
                f"{MAX_PARAMETER_BYTES >> 20} MiB are"
            )
        device = next((p.device for p in parameters), torch.device("cpu"))
        if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < FREE_FACTOR * needed:
            raise NotReplayableError(
                f"its {needed >> 20} MiB of sharded parameters would be copied whole, and {free >> 20} MiB are free"
            )

    def take(self, module: nn.Module) -> None:
        """Copy what `module`, just gathered, holds; once. NotReplayableError where it is sharded by other means too."""
        with undisturbed("cpu"):
            for owner in self._managed.get(id(module), ()):
                for name, parameter in vars(owner)[_PARAMETERS].items():
                    if parameter is not None and (id(owner), name) not in self._copies:
                        self._copies[id(owner), name] = self._copied(parameter, name)

    def _copied(self, parameter: torch.Tensor, name: str) -> nn.Parameter:
        if not is_plain(parameter):
            raise NotReplayableError(
                f"parameter {name} is a {type(parameter).__name__} in the forward: sharded otherwise too"
            )
        if id(parameter) not in self._made:  # tied parameters stay tied
            copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = copy
        return self._made[id(parameter)]

    @contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """Put the copies in place of the shards, and casts in place of FSDP's hooks; afterwards put all back.

        NotReplayableError where a shard has no copy: its module was not called.
        """
        changes = [change for module in self._sharded for change in self._changes(module)]
        before = [(module, name, vars(module)[name]) for module, name, _ in changes]
        try:
            for module, name, value in changes:
                vars(module)[name] = value
            yield
        finally:
            for module, name, value in before:
                vars(module)[name] = value

    def _changes(self, module: nn.Module) -> Generator[tuple[nn.Module, str, Any], None, None]:
        for owner in self._managed[id(module)]:
            yield owner, _PARAMETERS, self._parameters(owner)
        pre, policy = _replaced(vars(module)[_PRE], _cast_inputs)
        post, other = _replaced(vars(module)[_POST], _cast_output)
        if policy is None or other is None:
            raise NotReplayableError(
                f"the hooks of {type(module).__name__} are not those of the FSDP that is known here"
            )
        yield module, _PRE, pre
        yield module, _POST, post

    def _parameters(self, owner: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, parameter in vars(owner)[_PARAMETERS].items():
            found[name] = self._copies.get((id(owner), name), parameter)
            if found[name] is not None and not is_plain(found[name]):
                raise NotReplayableError(
                    f"parameter {name} of a {type(owner).__name__} was not gathered in the forward"
                )
        return found


def _managed(module: nn.Module) -> Sequence[nn.Module]:
    """Return `module` and those below it that no other sharded module stands above."""
    found = [module]
    for child in module.children():
        if not is_sharded(child):
            found.extend(_managed(child))
    return found


def _replaced(
    hooks: OrderedDict[int, Any], cast: Callable[[Any], Callable[..., Any]]
) -> tuple[OrderedDict[int, Any], Any]:
    """Return the hooks with FSDP's replaced by its cast, under the same keys, and its policy, None without one."""
    policies = {key: fsdp_policy(hook) for key, hook in hooks.items()}
    found = OrderedDict((k, hook if policies[k] is None else cast(policies[k])) for k, hook in hooks.items())
    return found, next((policy for policy in policies.values() if policy is not None), None)


def _cast_inputs(policy: Any) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        return _cast(args, dtype), _cast(kwargs, dtype)

    return hook


def _cast_output(policy: Any) -> Callable[..., Any]:
    return lambda module, args, output: _cast(output, policy.output_dtype)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return pytree.tree_map(
        lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values
    )
