"""What each framework has an option for, by `knobs.toml`: the text that sets it, with `$patterns` for modules.

Names drift, and a name that is gone is the framework's to say. What has no entry there has no option: the snippet is
PyTorch code then.
"""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

SAME_AS = {"slime": "megatron", "miles": "megatron", "transformer-engine": "megatron"}
"""Frameworks whose training runs through another's options."""
WHERE_TO_CALL = {
    "openrlhf": """\
# OpenRLHF: at the end of `openrlhf.models.Actor.__init__`, call `enable(self.model)`. Rollouts are vLLM's, which
# this code does not reach: on that side the correction takes an option of vLLM's.
""",
    "alto": """\
# ALTO: these modules must be in `ignore` of its LowPrecisionTrainingModifier, or they are quantized twice.
""",
}
"""Where the PyTorch code goes, as comment lines."""
MACRO_BLOCK_OF = {"alto": 128}
"""Elements under one mantissa, where a framework has macro-block scaling of one size."""


def knob_for(framework: str, correction: Correction, kinds: Sequence[str]) -> tuple[str, str, str] | None:
    """Return (language, text, patterns to fill in) of a framework's option for these kinds of module, or None."""
    framework = SAME_AS.get(framework, framework)
    knob = _knobs().get(framework, {}).get(correction.kind.value)
    if knob is None:
        return None
    size = MACRO_BLOCK_OF.get(framework)
    if correction.kind is CorrectionKind.MACRO_BLOCK_SCALING and correction.parameter != size:
        return None
    return knob["language"], knob["text"], _patterns(framework, kinds)


@cache
def _knobs() -> dict[str, dict[str, dict[str, str]]]:
    """Return framework -> correction -> `language` and `text`."""
    return tomllib.loads((files("mxprobe.attribution") / "knobs.toml").read_text(encoding="utf-8"))


def _patterns(framework: str, kinds: Sequence[str]) -> str:
    if framework in ("verl", "alto"):
        return ", ".join(f'"re:.*{kind}$"' for kind in kinds)
    if framework == "megatron":
        return "\n".join(
            f'  keep_{index}: {{type: glob, enabled: true, pattern: "*.{kind}", config: bf16}}'
            for index, kind in enumerate(kinds)
        )
    return ", ".join(f'"*{kind}*"' for kind in kinds)
