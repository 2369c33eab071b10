"""Results as data that JSON can hold."""

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain_data(value: Any) -> Any:
    """Return dataclasses as dicts, enumerations as their values, numbers that are not finite as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
