"""Numbers out of what user code logs, without touching a device; in a process without torch too."""

from __future__ import annotations

import numbers
import sys
from typing import Any


def scalar(value: Any) -> float | None:
    """Return the value as a float, NaN and infinities included; None for anything but one real number on the CPU.

    Python and numpy numbers, and tensors and arrays of one element. A bool is a flag, not a metric.
    """
    if type(value) is float:
        return value
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, numbers.Real):
            return float(value)
        if _is_tensor(value):
            return _from_tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray) and value.size == 1 and value.dtype.kind in "fiu":
            return float(value.reshape(-1)[0])
    except Exception:
        return None  # a number that no float can hold, or an operator that the moment does not allow
    return None


def is_on_device(value: Any) -> bool:
    """Say whether a value is a tensor of one element that could only be read by waiting for its device."""
    try:
        return _is_tensor(value) and value.device.type not in ("cpu", "meta") and value.numel() == 1
    except Exception:
        return False  # a subclass without a size


def integer(value: Any) -> int | None:
    """Return the value as a step count, or None."""
    number = scalar(value)
    return int(number) if number is not None and abs(number) < 2**53 else None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    tensor_type = vars(torch).get("Tensor") if torch is not None else None
    return tensor_type is not None and isinstance(value, tensor_type)


def _from_tensor(tensor: Any) -> float | None:
    import torch

    from mxprobe.measuring.isolation import is_off_limits, is_plain, undisturbed

    if tensor.device.type != "cpu" or not is_plain(tensor) or tensor.numel() != 1:
        return None
    if tensor.dtype is torch.bool or tensor.dtype.is_complex or is_off_limits(tensor):
        return None
    with undisturbed("cpu"):
        return float(tensor.item())
