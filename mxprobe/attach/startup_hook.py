"""The `.pth` file that makes every Python of an environment listen when MXPROBE_LISTEN=1."""

import sysconfig
from pathlib import Path

from mxprobe.errors import UsageError

_NAME = "mxprobe-listener.pth"
# site.py executes lines that begin with `import`. Without the variable the cost is one look at the environment.
_LINE = (
    'import os; os.environ.get("MXPROBE_LISTEN") == "1" and '
    '__import__("mxprobe.listener", fromlist=["listen"]).listen()\n'
)


def hook_path() -> Path:
    """Return where the hook of the running interpreter's environment is, or would be."""
    return Path(sysconfig.get_paths()["purelib"]) / _NAME


def install() -> Path:
    """Put the hook in place; UsageError where the environment is read-only."""
    path = hook_path()
    try:
        path.write_text(_LINE)
    except OSError as error:
        raise _read_only(path, error) from None
    return path


def remove() -> Path | None:
    """Take it away; None if there was none."""
    path = hook_path()
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _read_only(path, error) from None
    return path


def _read_only(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot change {path}: {error.strerror}",
        cause="the environment belongs to another user or is read-only",
        remedy="start jobs with `mxprobe run -- ...`, which changes no environment",
    )
