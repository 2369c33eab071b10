"""How every number on the page is defined, with the raw ratios for comparison with the paper."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from mxprobe.attribution import Thresholds, ratios
from mxprobe.schema import Rule

from . import names
from .markup import Html, basis, card, number, scope, table, tag
from .operands import Operands

LEMMA_NOTE = (
    "Rule {rule} allows scales below amax/6, so values can be clipped, and the lemma <e_dz, e_scale> = <e_dz, e_grid> "
    "= 0 does not hold: the parts still add up to the error, but their cross terms are not zero. Clipping is counted "
    "as a fourth part."
)
_OVERSHOOTING = {rule.value for rule in Rule if not rule.covers_amax}


def lemma_notes(operands: Operands) -> list[str]:
    """One sentence per scale rule of the statistics under which the deadzone is not orthogonal to the rest."""
    return [LEMMA_NOTE.format(rule=rule) for rule in sorted(set(operands.totals["rule"]) & _OVERSHOOTING)]


def section(operands: Operands, thresholds: Thresholds) -> Html:
    lemma = [tag("p", tag("b", "Lemma. "), note) for note in lemma_notes(operands)]
    words = tag(
        "p",
        *(basis("measured"), " computed from tensors of this run. "),
        *(basis("predicted"), " follows from measured tensors through a formula. "),
        *(basis("associated"), " happened at the same time; no cause is claimed."),
    )
    prose = [tag("div", tag("h3", "Words"), words), *[_definition(*text) for text in _DEFINITIONS]]
    columns = tag("div", *prose, class_="columns")
    body = tag("div", *lemma, columns, class_="prose")
    return card("Methods", body, _raw(operands), _thresholds(thresholds), id="methods", class_="long")


def _definition(title: str, formula: Sequence[str], text: str) -> Html:
    shown = tag("div", "\n".join(formula), class_="formula") if formula else ""
    return tag("div", tag("h3", title), shown, tag("p", text))


_DEFINITIONS: tuple[tuple[str, Sequence[str], str], ...] = (
    (
        "Three exact parts of the rounding error",
        (
            "e       = Q(x) − x = e_scale + e_dz + e_grid",
            "e_scale = Q(x) − Q*(x)",
            "e_dz    = Q*(x) − x   where Q*(x) = 0, x ≠ 0",
            "e_grid  = Q*(x) − x   elsewhere",
        ),
        "Q is MXFP4 with power-of-two scales s on blocks of 32 along the contraction; Q* has the ideal real scale "
        "s* = amax/6. Source: arXiv 2605.20402.",
    ),
    (
        "Remainder split",
        ("scale    = 1 − ‖Q*(x) − x‖² / ‖e‖²", "deadzone = ‖e_dz‖² / ‖e‖²", "grid     = ‖e_grid‖² / ‖e‖²"),
        "Adds to 1. Scale is what ideal scales would remove; it is negative where powers of two did better. Sums over "
        "steps, rows and layers are added first and divided last.",
    ),
    (
        "Output error",
        ("out_error = ‖(Q(X) − X) Wᵀ‖² / ‖X Wᵀ‖²",),
        "Each operand quantized alone; dgrad and wgrad likewise, along their own contractions. The error of a tensor "
        "is not the error of its product: one outlier channel makes the first small and the second large. The split "
        "of the output error is the remainder split through the GEMM, where the deadzone and grid parts correlate; "
        "their cross term is shared equally. “Made on zeroed values” is the output error of those elements alone. "
        "Whether a run quantizes its backward is not recorded: dgrad and wgrad are what-ifs.",
    ),
    (
        "Gaussian reference",
        (),
        "What MXFP4 does to Gaussian data of the tensor's own root mean square, by numerical integration: about "
        "18.8 dB, and 10.7 % to 11.7 % of values rounded to zero. A level says little without it.",
    ),
    (
        "Realised, predicted, mismatch",
        ("realised  = ‖y − b − x Wᵀ‖² / ‖x Wᵀ‖²", "predicted = ‖Q(x) Q(W)ᵀ − x Wᵀ‖² / ‖x Wᵀ‖²"),
        "On sampled rows, W being the trainer's current weight and Q the recipe that reproduces y best. Mismatch is "
        "the median over modules of |realised in rollout − realised in training|.",
    ),
    (
        "Gain, recovery, agreement",
        (),
        "Gain is the part of the output error that a correction removes, measured by applying it to the tensors at "
        "hand; its interval is a t interval over probed steps. Recovery is the part of the named component that it "
        "mends. Resample agreement is the share of bootstrap resamples of the probed steps that end in the same "
        "decision; it is not the probability that the verdict is right.",
    ),
)


def _raw(operands: Operands) -> Html:
    if not len(operands.totals):
        return Html("")
    sums = operands.totals.groupby("role")[list(ratios.ADDITIVE)].sum(min_count=1)
    frame: pd.DataFrame = ratios.tensor_ratios(sums)
    keys = ("raw_scale", "raw_deadzone", "raw_grid", "raw_cross", "cos_scale_grid", "gain", "gain_ideal")
    rows: list[list[Any]] = [
        [names.ROLE_LABELS[operands.roles[int(role)]], *[number(float(row[key])) for key in keys]]
        for role, row in zip(frame.index, frame.to_dict("records"), strict=True)
    ]
    head = [
        "operand",
        "‖e_scale‖²",
        "‖e_dz‖²",
        "‖e_grid‖²",
        "cross terms",
        "cos(scale, grid)",
        "gain of Q",
        "gain of Q*",
    ]
    warning = (
        "Relative to ‖e‖². These are not shares: e_scale and e_grid are anti-correlated, so the first exceeds 1 on "
        "almost any tensor. Gain is <Q(x), x> / ‖x‖²."
    )
    summary = tag("summary", "Raw ratios, for comparison with the paper")
    note = tag("p", warning, " ", scope("steps", "rank", "operands"), class_="note")
    return tag("details", summary, table(head, rows, numeric=range(1, 8)), note)


def _thresholds(thresholds: Thresholds) -> Html:
    shown = (
        (name, value if isinstance(value, str) else number(float(value))) for name, value in vars(thresholds).items()
    )
    rows = [[tag("code", name), text] for name, text in shown]
    return tag(
        "details", tag("summary", "Thresholds of the verdict"), table(["threshold", "value"], rows, numeric=(1,))
    )
