"""Evenly spaced samples."""


def evenly(n: int, count: int) -> list[int]:
    """Return at most `count` of range(n), evenly spaced, the first and the last half a step from the ends."""
    count = min(n, count)
    return [(2 * i + 1) * n // (2 * count) for i in range(count)]
