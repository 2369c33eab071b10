"""How many experts to keep by name: `8`, `all`."""

from typing import Any

import click
from click.shell_completion import CompletionItem

ALL = -1


class Experts(click.ParamType):
    """A number from 0, or `all` as -1."""

    name = "n|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if text in ("all", str(ALL)):
            return ALL
        if not text.isdecimal():
            self.fail(f"{value!r} is neither a number of experts nor `all`", param, ctx)
        return int(text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem("all")] if "all".startswith(incomplete) else []
