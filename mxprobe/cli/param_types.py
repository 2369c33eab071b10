"""The kinds of values that options take: durations, sizes, shares, steps or time to keep, numbers of experts."""

from typing import Any

import click
from click.shell_completion import CompletionItem

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MIN_BYTES = 10**6
ALL_EXPERTS = -1

_Param = click.Parameter | None
_Context = click.Context | None


class Duration(click.ParamType):
    """`90`, `90s`, `10m` or `1.5h`, as seconds (float). A bare number is in seconds. It must be positive."""

    name = "duration"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> float:
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


class Share(click.ParamType):
    """`3%` or `0.03`, as a float from 0 to 1."""

    name = "share"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> float:
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a share; write for example 3% or 0.03", param, ctx)
        if not 0 <= share <= 1:
            self.fail(f"{value!r}: must be from 0 to 100%", param, ctx)
        return share


class Size(click.ParamType):
    """`2GB` or `500MiB`, as bytes (int). A bare number is in bytes; 0 is no limit."""

    name = "size"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().replace(" ", "")
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        try:
            size = float(number) * _BYTES[text[len(number) :] or "b"]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a size; write for example 500MB, 2GB or 1GiB", param, ctx)
        if size != 0 and not MIN_BYTES <= size < float("inf"):
            self.fail(f"{value!r}: must be 1MB or more, or 0 for no limit", param, ctx)
        return int(size)


class Kept(click.ParamType):
    """`5000` as (steps, None), `24h` or `7d` as (None, seconds)."""

    name = "kept"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> tuple[int | None, float | None]:
        if isinstance(value, tuple):
            return value
        text = str(value).strip()
        if not text.isdecimal():
            days = text[:-1] if text.lower().endswith("d") else ""
            if days.replace(".", "", 1).isdecimal():
                text = f"{float(days) * 24}h"
            return None, Duration().convert(text, param, ctx)
        if int(text) < 1:
            self.fail(f"{value!r}: must be 1 step or more", param, ctx)
        return int(text), None


class Experts(click.ParamType):
    """`8` or `all`, as a number of experts from 0 or ALL_EXPERTS."""

    name = "n|all"

    def convert(self, value: Any, param: _Param, ctx: _Context) -> int:
        text = str(value).strip()
        if text in ("all", str(ALL_EXPERTS)):
            return ALL_EXPERTS
        if not text.isdecimal():
            self.fail(f"{value!r} is neither a number of experts nor `all`", param, ctx)
        return int(text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem("all")] if "all".startswith(incomplete) else []
