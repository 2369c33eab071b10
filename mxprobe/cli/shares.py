"""Shares on the command line: `3%`, `0.03`."""

from typing import Any

import click


class Share(click.ParamType):
    """A number from 0 to 1, as a float."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a share; write for example 3% or 0.03", param, ctx)
        if not 0 <= share <= 1:
            self.fail(f"{value!r}: must be from 0 to 100%", param, ctx)
        return share
