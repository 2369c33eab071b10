"""`run.json` of a trace: how the run was started and sampled, and which schema its tables have."""

import json
from pathlib import Path
from typing import Any

from mxprobe.errors import TraceError
from mxprobe.schema import SCHEMA_MINOR, SCHEMA_VERSION
from mxprobe.tables import TABLES

from . import layout


def read_run(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Read `run.json` of a trace, and say what is wrong with it.

    Raises:
        TraceError: no directory, not a trace, or a schema newer than this version reads.
    """
    if not directory.is_dir():
        raise TraceError(
            f"no trace at {directory}: " + ("it is a file" if directory.exists() else "there is no such directory"),
            cause="a typing error, or the attach never started",
            remedy="give the directory that `mxprobe attach -o` wrote, e.g. RUN.mxprobe",
        )
    if not layout.looks_like_trace(directory):
        raise TraceError(
            f"{directory} is not a trace: it has neither {layout.RUN_FILE} nor tables",
            cause="another directory was meant",
            remedy="give the directory that `mxprobe attach -o` wrote, e.g. RUN.mxprobe",
        )
    try:
        run: Any = json.loads((directory / layout.RUN_FILE).read_text(encoding="utf-8"))
        if not isinstance(run, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return {}, [f"{layout.RUN_FILE} is missing: how the run was started and sampled is not known."]
    except OSError as error:
        return {}, [
            f"{layout.RUN_FILE} cannot be read ({error.strerror}): how the run was started and sampled is not known."
        ]
    except (ValueError, RecursionError):
        if not layout.live_files(directory) and not any(layout.part_files(directory, table) for table in TABLES):
            raise TraceError(
                f"{directory / layout.RUN_FILE} is half written and there are no tables beside it",
                cause="the copy was interrupted, or something else wrote there",
                remedy="copy the trace again, or make a new one",
            ) from None
        return {}, [f"{layout.RUN_FILE} is half written: how the run was started and sampled is not known."]
    return run, _schema_problems(directory, run)


def _schema_problems(directory: Path, run: dict[str, Any]) -> list[str]:
    version, minor = run.get("schema_version"), run.get("schema_minor", 0)
    if not isinstance(version, int):
        return ["run.json does not say which schema version the trace has."]
    if version > SCHEMA_VERSION:
        raise TraceError(
            f"{directory} has schema version {version}; this mxprobe reads up to {SCHEMA_VERSION}",
            cause=f"it was written by a newer mxprobe ({run.get('mxprobe', 'version unknown')})",
            remedy="upgrade mxprobe: pip install -U mxprobe",
        )
    if version == SCHEMA_VERSION and isinstance(minor, int) and minor > SCHEMA_MINOR:
        return [f"The trace has the newer schema {version}.{minor}; columns unknown here are left out."]
    return []
