"""One forward pass of a root module, kept so that it can be run again: its arguments, random state and autocast.

Arguments are tensors (cloned) in lists, tuples and dictionaries, and plain values. Anything else could be changed by
a second forward (a key-value cache), and such a call is refused. So are models whose forward communicates; FSDP2's does
not in a replay (`sharded`).
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mxprobe.measuring import compat
from mxprobe.measuring.isolation import is_plain, undisturbed
from mxprobe.measuring.replay.policy_output import TOKEN_ARGUMENT, PolicyOutput, find_policy, given_tokens
from mxprobe.measuring.replay.preservation import RandomState, preserved
from mxprobe.measuring.replay.refusal import NotReplayableError
from mxprobe.measuring.replay.sharded import WholeParameters, is_sharded

MAX_ARGUMENT_BYTES = 1 << 30
"""Arguments larger than this are not copied: they are no token ids."""

_PLAIN_VALUES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine", "PipelineStage")


@dataclass(frozen=True)
class Call:
    """A captured call: `module.forward(*args, **kwargs)` under these states."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    device_type: str
    autocast_dtype: torch.dtype | None
    """None where autocast was off."""
    whole: WholeParameters | None = None
    """Copies of sharded parameters; None where none are sharded."""

    def argument(self, name: str) -> Any:
        """Return the argument of that name, passed by keyword or by position; None if there is none."""
        if name in self.kwargs:
            return self.kwargs[name]
        try:
            names = list(inspect.signature(self.module.forward).parameters)
        except (TypeError, ValueError):
            return None
        index = names.index(name) if name in names else len(self.args)
        return self.args[index] if index < len(self.args) else None

    def tokens(self, shape: torch.Size) -> torch.Tensor | None:
        """Return the token that follows each position of logits of that shape, as `given_tokens` does."""
        return given_tokens(self.argument(TOKEN_ARGUMENT), shape)


def capture(root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Copy a call of `root` that is about to run. NotReplayableError says why it cannot be.

    Dispatches copies to the device and does not wait for them.
    """
    module = replay_target(root)
    whole = WholeParameters(module) if any(is_sharded(inner) for inner in module.modules()) else None
    device_type = next((p.device for p in module.parameters()), torch.device("cpu")).type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    budget = _Budget()
    with undisturbed(device_type):
        copied_args = tuple(budget.copy(value, f"argument {index}") for index, value in enumerate(args))
        copied_kwargs = {name: budget.copy(value, name) for name, value in kwargs.items()}
    return Call(module, copied_args, copied_kwargs, RandomState.now(module), device_type, autocast, whole)


def replay_target(root: nn.Module) -> nn.Module:
    """Return the module whose forward is run: what DistributedDataParallel or torch.compile wrap, else the root.

    NotReplayableError for a model whose forward talks to other ranks, or might: they would wait for ever.
    """
    module = root
    is_replicated = any(type(each).__name__ == "DistributedDataParallel" for each in (root, *root.children()))
    is_fully_sharded = any(is_sharded(each) for each in root.modules())
    if _world_size() > 1 and not is_replicated and not is_fully_sharded:
        raise NotReplayableError(
            f"the run has {_world_size()} ranks and its model is neither DistributedDataParallel nor sharded by "
            "fully_shard, so that its forward may communicate"
        )
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner: Any = module
        module = compat.compiled_module(inner) if type(inner).__name__ == "OptimizedModule" else inner.module
    for inner in module.modules():
        names = {cls.__name__ for cls in type(inner).__mro__}
        if names & set(_SHARDED):
            raise NotReplayableError(f"{type(inner).__name__} gathers parameters from other ranks in its forward")
        if isinstance(inner, nn.SyncBatchNorm):
            raise NotReplayableError("SyncBatchNorm communicates with other ranks in its forward")
    sharded = {id(p) for inner in module.modules() if is_sharded(inner) for p in inner.parameters()}
    for parameter in module.parameters():
        if not is_plain(parameter) and hasattr(parameter, "device_mesh") and id(parameter) not in sharded:
            raise NotReplayableError("its parameters are sharded over ranks (DTensor), not by fully_shard")
    return module


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class _Budget:
    def __init__(self) -> None:
        self._left = MAX_ARGUMENT_BYTES

    def copy(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                raise NotReplayableError(f"{where} is a {type(value).__name__}")
            self._left -= value.numel() * value.element_size()
            if self._left < 0:
                raise NotReplayableError(f"its arguments are larger than {MAX_ARGUMENT_BYTES >> 20} MiB")
            return value.detach().clone()
        if isinstance(value, _PLAIN_VALUES):
            return value
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, where) for item in value)
        if type(value) is dict:
            return {key: self.copy(item, f"{where}[{key!r}]") for key, item in value.items()}
        raise NotReplayableError(f"{where} is a {type(value).__name__}, which a second forward could change")


def is_by_sample(module: nn.Module) -> bool:
    """Say whether each sample's result is its own: neither dropout, which draws for the batch, nor batch norm is on."""
    for each in module.modules():
        name = type(each).__name__
        draws = name.endswith("Dropout") and float(getattr(each, "p", 0.0)) > 0
        if each.training and (draws or "BatchNorm" in name):
            return False
    return True


def with_samples(call: Call, n_batch: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """Return the call with `change` made to every tensor argument whose first axis is the batch."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value) if value.dim() and value.shape[0] == n_batch else value
        if type(value) in (list, tuple):
            return type(value)(changed(item) for item in value)
        return {key: changed(item) for key, item in value.items()} if type(value) is dict else value

    return replace(call, args=changed(call.args), kwargs=changed(call.kwargs))


@contextmanager
def replayed(call: Call, *, gradient: bool) -> Generator[None, None, None]:
    """Put up the surroundings of the captured call for its forward and backward; then put all back.

    The same dropout as in training, autocast as it was, no mode of the user's. Within, `forward` runs the call.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradient))
        stack.enter_context(compat.without_dispatch_modes())
        dtype = call.autocast_dtype
        stack.enter_context(torch.autocast(call.device_type, dtype, enabled=dtype is not None, cache_enabled=False))
        if call.whole is not None:
            stack.enter_context(call.whole.in_place())
        stack.enter_context(preserved(call.module, call.random))
        yield


def forward(call: Call) -> Any:
    """Run the call; only inside `replayed`. The module's own hooks are left out: what they changed is in the copy."""
    return call.module.forward(*call.args, **call.kwargs)


def forward_policy(call: Call) -> PolicyOutput:
    """Run the call as `forward` does and return its policy; NotReplayableError where it returns none."""
    policy = find_policy(forward(call))
    if policy is None:
        raise NotReplayableError("the model returns neither logits [B, T, V] nor log-probabilities")
    return policy
