"""Sections of the page, from the jinja2 templates of this package.

Templates escape all they are given, but for what is `Markup` already: no name in a trace can become markup.
"""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mxprobe import numbers
from mxprobe.attribution.words import ROLE_LABELS


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package filled in. A value that the template uses and is not given is an error."""
    return Markup(_environment().get_template(template).render(**values).strip())


def code(text: object) -> Markup:
    """Return the text as an element for names and commands."""
    return Markup("<code>{}</code>").format(text)


@cache
def asset(name: str) -> str:
    """Return a file of this package, by its path in it."""
    return files("mxprobe_reports").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: asset(f"templates/{name}")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    spellings = (numbers.number, numbers.percent, numbers.fixed)
    environment.filters.update({spell.__name__: spell for spell in spellings})
    environment.filters["role"] = _role
    return environment


def _role(role: str) -> str:
    return ROLE_LABELS.get(role, role or numbers.NOTHING)
