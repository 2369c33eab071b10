"""Facts of table `events`: read from its columns, which old traces lack. There, and only there, words are read.

Up to schema 1.1 an event was a kind and words. Its facts are found again by the templates that the words were made
of; what fits none keeps empty columns.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from string import Formatter
from typing import Any

import pandas as pd
import pyarrow as pa

from mxprobe.events import TEMPLATES, Event

_FACTS = ("subject", "state", "data")
_NOT_FINITE = ("inf", "-inf", "nan")
_NUMBER = re.compile(r"\d+|\d+(\.\d+)?(e[+-]\d+)?|-?inf|nan")
_PATTERNS = {"subject": ".+", "phase": "train|rollout|eval", "role": r"\w+"}


def events_of(rows: pd.DataFrame, kind: str) -> Iterator[tuple[int, Event]]:
    """Yield (step, event) of each row of that kind whose facts are known, in the order of the rows."""
    known = rows[(rows["kind"].astype(str) == kind) & rows["state"].notna()]
    for step, subject, state, data in known[["step", *_FACTS]].itertuples(index=False, name=None):
        values = {name: float(value) if value in _NOT_FINITE else value for name, value in json.loads(data).items()}
        yield int(step), Event(kind, str(subject), str(state), values)


def with_facts(rows: Any) -> Any:
    """Return the rows of `events`, a `pa.Table`, with the facts that an old version left to the words."""
    if not {*_FACTS, "kind", "detail"} <= set(rows.column_names) or not rows.column("subject").null_count:
        return rows
    columns = {name: rows.column(name).to_pylist() for name in (*_FACTS, "kind", "detail")}
    for index, (kind, words) in enumerate(zip(columns["kind"], columns["detail"], strict=True)):
        event = None if columns["subject"][index] is not None else _parsed(str(kind), str(words))
        if event is not None:
            columns["subject"][index], columns["state"][index] = event.subject, event.state
            columns["data"][index] = json.dumps(event.data)
    for name in _FACTS:
        at = rows.schema.get_field_index(name)
        field = rows.schema.field(at)
        values = pa.array(columns[name], pa.string())
        if pa.types.is_dictionary(field.type):
            values = values.dictionary_encode()
        rows = rows.set_column(at, field, values.cast(field.type))
    return rows


def _parsed(kind: str, words: str) -> Event | None:
    for state in TEMPLATES.get(kind, ()):
        match = _pattern(kind, state).fullmatch(words)
        if match is not None:
            data = match.groupdict()
            subject = data.pop("subject", "")
            return Event(kind, subject, state, {name: _number(name, text) for name, text in data.items()})
    return None


@cache
def _pattern(kind: str, state: str) -> re.Pattern[str]:
    parts = [
        re.escape(text) + (f"(?P<{name}>{_PATTERNS.get(name, '.+?')})" if name else "")
        for text, name, _, _ in Formatter().parse(TEMPLATES[kind][state])
    ]
    return re.compile("".join(parts), re.DOTALL)


def _number(name: str, text: str) -> Any:
    """Return the value that a field of the words spells: a number unless it is a hash or a name."""
    if "codes" in name or not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.isdecimal() else float(text)
