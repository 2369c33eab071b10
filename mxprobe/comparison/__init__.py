"""Two runs side by side, B relative to A."""

from .comparison import Comparison, compare
from .prediction import Outcome

__all__ = ["Comparison", "Outcome", "compare"]
