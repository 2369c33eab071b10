"""What a report is made of: the frames of a trace, its run, its problems and the recommendation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mxprobe.attribution import Recommendation
from mxprobe.schema import TABLES
from mxprobe.trace import Trace


def _empty(table: str) -> pd.DataFrame:
    return pd.DataFrame({name: [] for name, _ in TABLES[table]})


@dataclass(frozen=True)
class Inputs:
    """Frames have the columns of `mxprobe.schema.TABLES`;"""

    name: str
    recommendation: Recommendation
    run: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()
    tensors: pd.DataFrame = field(default_factory=lambda: _empty("tensors"))
    outputs: pd.DataFrame = field(default_factory=lambda: _empty("outputs"))
    whatif: pd.DataFrame = field(default_factory=lambda: _empty("whatif"))
    signals: pd.DataFrame = field(default_factory=lambda: _empty("signals"))
    events: pd.DataFrame = field(default_factory=lambda: _empty("events"))
    modules: pd.DataFrame = field(default_factory=lambda: _empty("modules"))
    overhead: pd.DataFrame = field(default_factory=lambda: _empty("overhead"))

    @classmethod
    def from_trace(cls, trace: Trace, recommendation: Recommendation) -> "Inputs":
        return cls(
            name=_name(trace.directory.resolve()),
            recommendation=recommendation,
            run=trace.run,
            problems=trace.problems,
            tensors=trace.tensors(),
            outputs=trace.outputs(),
            whatif=trace.whatif(),
            signals=trace.signals(),
            events=trace.events(),
            modules=trace.modules(),
            overhead=trace.overhead(),
        )


def _name(directory: Path) -> str:
    """The directory's name, with its parent's where the name alone says nothing."""
    return f"{directory.parent.name}/{directory.name}" if directory.stem == "trace" else directory.name
