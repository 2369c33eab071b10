"""Every private API that the agent calls is there in the installed torch, and means what it is taken for."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mxprobe.measuring import compat


class Counting(TorchFunctionMode):
    n_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return func(*args, **(kwargs or {}))


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return outputs[0] * 2


def test_modes_are_left_and_taken_off():
    x = torch.ones(2)
    with Doubling():
        assert (x + 1).tolist() == [4.0, 4.0]
        with compat.without_dispatch_modes():
            assert (x + 1).tolist() == [2.0, 2.0]
    with Counting() as mode, compat.without_torch_function():
        x.add(1)
    assert mode.n_calls == 0
    below, above = Counting(), Counting()
    below.__enter__()
    above.__enter__()
    compat.take_off_function_mode(below)
    assert _get_current_function_mode() is above
    compat.take_off_function_mode(above)
    assert _get_current_function_mode() is None


def test_what_is_under_way_is_known():
    said: dict[str, Any] = {}
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: said.update(backward=compat.in_backward()))
    y.sum().backward()
    torch.vmap(lambda v: (said.update(transformed=compat.is_transformed()), v)[1])(torch.ones(2))
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.trace(lambda v: (said.update(traced=compat.is_traced()), v * 2)[1], torch.ones(1), check_trace=False)
    checkpoint(lambda v: (said.update(checkpointed=compat.is_checkpointed()), v * 2)[1], x, use_reentrant=False)
    assert said == {"backward": True, "transformed": True, "traced": True, "checkpointed": True}
    assert not (compat.in_backward())
    assert not (compat.is_transformed())
    assert not (compat.is_traced())
    assert not (compat.is_checkpointed())


def test_tensors_say_what_they_are_part_of():
    x = torch.ones(4)
    assert compat.base_of(x[:2]) is x
    assert compat.base_of(x) is None
    version = compat.version_of(x)
    x.add_(1)
    assert compat.version_of(x) == version + 1
    assert compat.local_shard(x) is x
    assert compat.local_shard(type("DTensor", (), {"_local_tensor": x})()) is x
    assert [n.tolist() for n in compat.norms_of([torch.ones(4), torch.ones(9)], torch.float32)] == [2.0, 3.0]
    y = Double.apply(torch.ones(2, requires_grad=True))
    assert isinstance(y.grad_fn, compat.backward_node_class(Double))
    assert not isinstance((y * 2).grad_fn, compat.backward_node_class(Double))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_say_what_they_hold_and_how_they_run():
    linear = nn.Linear(2, 2)
    assert compat.own_parts(linear, "_parameters")["weight"] is linear.weight
    wrapped = torch.compile(linear)
    assert compat.is_compiled(wrapped)
    assert not compat.is_compiled(linear)
    assert compat.compiled_module(wrapped) is linear
    linear.compile()
    assert compat.is_compiled(linear)
    state = type("FSDPState", (), {"hook": lambda self: None})()
    state._mp_policy = "policy"
    assert compat.fsdp_policy(state.hook) == "policy"
    assert compat.fsdp_policy(lambda *_: None) is None
    assert "_mp_policy" in inspect.getsource(FSDPState)


def test_optimizers_and_frames_are_looked_at():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert compat.has_state_hooks(optimizer)
    assert not compat.has_state_hooks(object())
    said: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: said.append(compat.is_stepping(sys._getframe())))
    optimizer.step()
    assert said == [True]
    assert not compat.is_stepping(sys._getframe())

    def caller() -> Any:
        return callee()

    def callee() -> Any:
        return compat.caller_frame()

    assert caller().f_code is caller.__code__
    assert next(f.f_code.co_name for f in compat.frames_from(sys._getframe())) == inspect.stack()[0].function
    assert sys._getframe().f_code in {f.f_code for top in compat.top_frames() for f in compat.frames_from(top)}


def test_the_configuration_of_a_generation_is_found_by_its_frame():
    def generate(generation_config: Any) -> Any:
        return compat.generation_config(sys._getframe())

    assert generate("configuration") == (True, "configuration")
    assert compat.generation_config(sys._getframe()) == (False, None)
