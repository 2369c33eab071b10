"""Words for roles, components and corrections, the same in the terminal, in the report and in JSON."""

from collections.abc import Iterable, Sequence

from mxprobe.numbers import number, percent, whole_percent
from mxprobe.schema import Component, Role
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .recommendation import OperandGroup
from .update_visibility import UpdateVisibility

ROLE_WORDS: dict[Role, str] = {
    Role.X_FWD: "inputs",
    Role.W_FWD: "weights",
    Role.G_DGRAD: "output gradients (dgrad)",
    Role.W_DGRAD: "weights (dgrad)",
    Role.G_WGRAD: "output gradients (wgrad)",
    Role.X_WGRAD: "inputs (wgrad)",
}
ROLE_LABELS: dict[str, str] = {
    Role.X_FWD: "X fwd",
    Role.W_FWD: "W fwd",
    Role.G_DGRAD: "G dgrad",
    Role.W_DGRAD: "W dgrad",
    Role.G_WGRAD: "G wgrad",
    Role.X_WGRAD: "X wgrad",
}
"""For tables and axes."""
COMPONENT_WORDS: dict[Component, str] = {
    Component.SCALE: "scale bias",
    Component.DEADZONE: "deadzone",
    Component.GRID: "grid noise",
    Component.SATURATION: "saturation",
    Component.MIXED: "no single component",
    Component.NONE: "no component",
}


def correction_words(correction: str) -> str:
    """Return the words for a correction: `of:0.5` -> `outlier fallback (alpha 0.5)`; an unknown one as it is."""
    try:
        parsed = Correction.parse(correction)
    except ValueError:
        return correction
    parameter = parsed.parameter
    share = parameter if isinstance(parameter, (int, float)) else 0.0
    return {
        CorrectionKind.RULE: f"scale rule {parameter}",
        CorrectionKind.MACRO_BLOCK_SCALING: f"macro-block scaling ({parameter})",
        CorrectionKind.OUTLIER_FALLBACK: f"outlier fallback (alpha {parameter})",
        CorrectionKind.HADAMARD: f"random Hadamard rotation ({parameter})",
        CorrectionKind.CHANNEL_RESIDUAL: f"a second pass on {share:g} % of the channels",
        CorrectionKind.STOCHASTIC: "stochastic rounding",
        CorrectionKind.NVFP4: "NVFP4",
        CorrectionKind.NVFP4_4OVER6: "NVFP4 with Four-over-Six",
        CorrectionKind.MXFP4_4OVER6: "the better of two scales for each block",
        CorrectionKind.HIF4: "HiF4",
        CorrectionKind.MXFP6_E2M3: "MXFP6 (E2M3)",
        CorrectionKind.MXFP6_E3M2: "MXFP6 (E3M2)",
        CorrectionKind.MXFP8: "MXFP8",
        CorrectionKind.KEEP_HIGH_PRECISION: "high precision",
    }[parsed.kind]


def listed(items: Iterable[str], *, last: str = "and", limit: int = 12) -> str:
    """Return `a, b and c`; beyond the limit, `a, b and 7 more`."""
    names = list(items)
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else "nothing"


def place(where: Sequence[OperandGroup]) -> str:
    """Return `the inputs of q_proj and k_proj, and the inputs and weights of o_proj`."""
    roles_of: dict[str, list[str]] = {}
    for group in where:
        roles_of.setdefault(group.module_kind, []).append(ROLE_WORDS[group.role])
    kinds_of: dict[str, list[str]] = {}
    for kind, roles in roles_of.items():
        kinds_of.setdefault(listed(roles), []).append(kind)
    return ", and ".join(f"the {roles} of {listed(kinds)}" for roles, kinds in kinds_of.items())


def sentence(text: str) -> str:
    """Return the text with a capital first letter; the rest stays as it is spelled."""
    return text[:1].upper() + text[1:]


def update_words(seen: UpdateVisibility) -> str:
    """Say in two sentences."""
    back = f"; {whole_percent(seen.return_frac)} of these go back to the value before" if seen.return_frac >= 0 else ""
    return (
        f"An update changes the weights by {number(seen.relative_update)} of their norm and the MXFP4 value of "
        f"{percent(seen.flip_frac)} of them{back} (measured, {seen.n_modules} modules, {seen.n_steps} steps). "
        f"What arrives has cosine {number(seen.cosine)} with the update and {number(seen.norm_ratio)} times its norm."
    )
