"""The private APIs of torch and CPython that the agent calls, each through one function.

Each function says on which versions it was tried, and what happens where the API is missing. Nothing is imported
for them: torch is there, and transformers is looked at only where it runs already.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

TRANSFORMERS_SAMPLERS = ("_sample", "generate")
"""Functions of transformers 5.24 that hold a local variable `generation_config` while they generate."""


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context without the user's dispatch modes. Tried on torch 2.6 and 2.13; where missing, they stay on."""
    from torch.utils import _python_dispatch

    leave = getattr(_python_dispatch, "_disable_current_modes", None)
    return nullcontext() if leave is None else leave()


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context that calls no function mode. Tried on torch 2.6 and 2.13; where missing, it does nothing."""
    disable = getattr(torch._C, "DisableTorchFunction", None)  # pyright: ignore[reportPrivateUsage]
    return nullcontext() if disable is None else disable()


def take_off_function_mode(mode: Any) -> None:
    """Take a function mode off this thread's stack and leave those above it on.

    Tried on torch 2.6 and 2.13; where the stack cannot be reached, AttributeError is raised and the mode stays on.
    """
    from torch import overrides

    stack: Any = overrides
    above: list[Any] = []
    top: Any = None
    while (top := stack._get_current_function_mode()) is not None and top is not mode:
        above.append(stack._pop_mode())
    if top is mode:
        stack._pop_mode()
    for each in reversed(above):
        stack._push_mode(each)


def in_backward() -> bool:
    """Say whether this thread runs a backward pass: a forward there is the recomputation of a checkpointed region.

    Tried on torch 2.6 and 2.13; where missing, the answer is no.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)  # pyright: ignore[reportPrivateUsage]
    return task is not None and task() != -1


def is_transformed() -> bool:
    """Say whether a functorch transform (`vmap`, `grad`) is under way.

    Tried on torch 2.6 and 2.13; where missing, the answer is no.
    """
    functorch = getattr(torch._C, "_functorch", None)  # pyright: ignore[reportPrivateUsage]
    return functorch is not None and functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Say whether `torch.jit` traces. It is public and not exported; tried on torch 2.6 and 2.13, where it exists."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def is_checkpointed() -> bool:
    """Say whether the forward under way stands in a region that `torch.utils.checkpoint` will run again.

    Tried on torch 2.13; torch 2.6 lacks it, and the answer there is no.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore
    hooks = None if top is None else top(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def base_of(view: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that `view` is a view of, or None. Tried on torch 2.6 and 2.13; where missing, None."""
    return getattr(view, "_base", None)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. Tried on torch 2.6 and 2.13; where missing, 0."""
    return getattr(tensor, "_version", 0)


def local_shard(tensor: Any) -> Any:
    """Return a DTensor's part on this rank, and anything else as it is.

    Tried on torch 2.6 and 2.13; where missing, the DTensor itself, which then counts as unreadable.
    """
    return getattr(tensor, "_local_tensor", tensor)


def norms_of(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, in one launch. Tried on torch 2.6 and 2.13; where missing, one by one."""
    many = getattr(torch, "_foreach_norm", None)
    if many is None:
        return [torch.linalg.vector_norm(each, dtype=dtype) for each in tensors]
    return list(many(tensors, 2, dtype))


def backward_node_class(function: type[torch.autograd.Function]) -> type:
    """Return the class of the graph nodes that a Python-defined function makes.

    Tried on torch 2.6 and 2.13; where missing, a class that no node has: the function then counts as foreign.
    """
    return getattr(function, "_backward_cls", type("NoNode", (), {}))


def own_parts(module: nn.Module, kind: str) -> Any:
    """Return a module's own `_parameters`, `_buffers`, `_modules` or hooks: the dictionary itself.

    No property of a foreign class is run. Tried on torch 2.6 and 2.13; where missing, an empty dictionary.
    """
    return vars(module).get(kind, {})


def is_compiled(module: nn.Module) -> bool:
    """Say whether the module's forward runs inside `torch.compile`.

    Tried on torch 2.6 and 2.13; where the marks are missing, the answer is no and its hooks are found not to fire.
    """
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Say whether the module was compiled by its own `compile()`: the hooks on it are compiled with it then.

    Tried on torch 2.6 and 2.13; where the mark is missing, the answer is no.
    """
    return vars(module).get("_compiled_call_impl") is not None


def compiled_module(module: Any) -> nn.Module:
    """Return the module inside an `OptimizedModule`. Tried on torch 2.6 and 2.13; where missing, AttributeError."""
    return module._orig_mod


def fsdp_policy(hook: Any) -> Any:
    """Return FSDP2's mixed-precision policy where the hook is a method of its state, or wraps one; else None.

    Tried on torch 2.6 and 2.13; where missing, None, and a sharded model is not replayed.
    """
    while hook is not None:
        owner = getattr(hook, "__self__", None)
        if type(owner).__name__ == "FSDPState":
            return getattr(owner, "_mp_policy", None)
        hook = getattr(hook, "__wrapped__", None)
    return None


def has_state_hooks(optimizer: Any) -> bool:
    """Say whether an optimizer takes hooks on its state: a wrapper's class may not have called torch's.

    Tried on torch 2.6 and 2.13; where missing, the answer is no and loaded optimizer states are not told of.
    """
    return hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")


def is_stepping(frame: FrameType | None) -> bool:
    """Say whether a thread with this top frame is inside `Optimizer.step`, by torch's wrapper around it.

    Tried on torch 2.6 and 2.13; where the wrapper has another name, the answer is no.
    """
    step_file = sys.modules["torch.optim.optimizer"].__file__
    return any(f.f_code.co_name == "wrapper" and f.f_code.co_filename == step_file for f in frames_from(frame))


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller_frame() -> FrameType | None:
    """Return the frame of the function that called the caller. Tried on CPython 3.9 and 3.11; where missing, None."""
    current = getattr(sys, "_getframe", None)
    return None if current is None else current(2)


def top_frames() -> list[FrameType]:
    """Return the top frame of every thread. Tried on CPython 3.9 and 3.11; where missing, none.

    Up to CPython 3.11.7, a garbage collection inside `sys._current_frames` that frees a `threading.local` waits for
    a lock which that call holds: the process hangs. So none may begin there.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(getattr(sys, "_current_frames", dict)().values())
    finally:
        if collects:
            gc.enable()


def generation_config(frame: FrameType) -> tuple[bool, Any]:
    """Say whether a frame is transformers' `generate` or `_sample`, and return the configuration it holds.

    Tried on transformers 5.24; under other names, no generation is recognised.
    """
    is_generating = is_generation(frame.f_code)
    return is_generating, frame.f_locals.get("generation_config") if is_generating else None


def is_generation(code: CodeType) -> bool:
    """Say whether it is the code of transformers' `generate` or `_sample`. No local variable is looked at.

    Tried on transformers 5.24; under other names, the answer is no.
    """
    return code.co_name in TRANSFORMERS_SAMPLERS and "generation_config" in code.co_varnames


def qualified_name(code: CodeType) -> str:
    """Return `Class.function`. CPython 3.11 has it; before, the function's name alone."""
    return getattr(code, "co_qualname", code.co_name)
