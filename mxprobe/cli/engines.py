"""`--engine`: what large tables of a trace are summed with."""

import click

from mxprobe.schema import ENGINES

option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="arrow",
    show_default=True,
    help="What sums large tables: this process; DuckDB on all cores; or Ray Data on a cluster that sees the trace.",
)
