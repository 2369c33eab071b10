"""Aggregations on a Ray cluster: Ray Data hands out the parts of a trace, each is summed where it is read.

All nodes must see the trace under the same path (a shared disk). With no cluster running, Ray starts one here.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mxprobe.errors import UsageError

from .aggregation import Aggregation, partial_of
from .sources import Source, sources


def partials_on_ray(directory: Path, aggregation: Aggregation) -> Iterator[Any]:
    """Partial sums of each file, in the order of the files, as the engine `arrow` adds them.

    Raises:
        TraceError: a file is damaged.
        UsageError: ray is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("the engine ray is not installed", remedy="pip install 'mxprobe[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, configure_logging=False)
    found = sources(directory.resolve(), aggregation.table)
    parts = [
        {"index": index, "path": str(source.path), "rank": source.rank}
        for index, source in enumerate(found)
        if not source.is_live
    ]
    sums: dict[int, Any] = {}
    if parts:
        ray.data.DataContext.get_current().enable_progress_bars = False
        work = partial(_partial_bytes, aggregation=aggregation)
        summed = ray.data.from_items(parts, override_num_blocks=len(parts)).map(work)
        for row in summed.iter_rows():
            sums[row["index"]] = pa.ipc.open_stream(row["sums"]).read_all()
    for index, source in enumerate(found):
        yield sums[index] if index in sums else partial_of(source, aggregation)  # live files are this machine's


def _partial_bytes(part: dict[str, Any], aggregation: Aggregation) -> dict[str, Any]:
    source = Source(Path(part["path"]), part["rank"], is_live=False, hold=False)
    table = partial_of(source, aggregation)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return {"index": part["index"], "sums": sink.getvalue().to_pybytes()}
