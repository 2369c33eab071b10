"""Durations on the command line: `90`, `90s`, `10m`, `1.5h`."""

from typing import Any

import click

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):
    """Seconds as a float; a bare number is in seconds. Must be positive."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip().lower()
        number, unit = (text[:-1], text[-1]) if text and text[-1] in _SECONDS else (text, "s")
        try:
            seconds = float(number) * _SECONDS[unit]
        except ValueError:
            self.fail(f"{value!r} is not a duration; write for example 90s, 10m or 1.5h", param, ctx)
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r}: must be more than nothing", param, ctx)
        return seconds
