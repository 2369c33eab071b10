"""Why an attach or a switch is refused, in words: slug -> what failed, likely cause, what to do.

The words are in `refusals.toml`. A refusal leaves the process as it was.
"""

import tomllib
from pathlib import Path

from mxprobe.errors import AttachError

_WORDS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))
REFUSALS: dict[str, dict[str, str]] = _WORDS["attach"]
SWITCH_REFUSALS: dict[str, dict[str, str]] = _WORDS["switch"]
_UNKNOWN: dict[str, str] = _WORDS["unknown"]
ENDINGS: dict[str, str] = _WORDS["ended"]
"""Reason with which an attachment ended -> the same in words."""


def refuse(reason: str, pid: int, detail: str = "", *, seconds: float = 0.0) -> AttachError:
    """Return the error of that slug, to be raised. An unknown slug (an agent's own) keeps its name and detail."""
    after_detail = f" ({detail})" if detail else ""
    values = {"pid": pid, "reason": reason, "detail": detail, "after_detail": after_detail, "seconds": seconds}
    words = {key: text.format(**values) for key, text in REFUSALS.get(reason, _UNKNOWN).items()}
    return AttachError(reason, **words)
