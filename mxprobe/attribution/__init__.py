"""From frames to a verdict: which component of the rounding error, in which operands, and what mends it."""

from .recommendation import (
    Agreement,
    Certainty,
    CorrectionScore,
    Coverage,
    Evidence,
    OperandGroup,
    Recommendation,
    Snippet,
)
from .thresholds import Thresholds
from .verdict import recommend

__all__ = [
    "Agreement",
    "Certainty",
    "CorrectionScore",
    "Coverage",
    "Evidence",
    "OperandGroup",
    "Recommendation",
    "Snippet",
    "Thresholds",
    "recommend",
]
