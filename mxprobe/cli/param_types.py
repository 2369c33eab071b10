"""Sizes and what to keep on the command line: `2GB`, `500MiB`; `5000` steps or `24h`."""

from __future__ import annotations

from typing import Any

import click

from mxprobe.cli.durations import Duration

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MIN_BYTES = 10**6


class Size(click.ParamType):
    """Bytes as an int; a bare number is in bytes, 0 is no limit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
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
    """(steps, None) of a bare number, (None, seconds) of a duration with its unit."""

    name = "kept"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, float | None]:
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
