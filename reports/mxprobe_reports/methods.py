"""How every number on the page is defined, with the raw ratios for comparison with the paper."""

from typing import Any

import pandas as pd

from mxprobe.attribution import Thresholds, ratios
from mxprobe_kernels.formats import get_rule

from . import names
from .markup import Html, basis, card, join, number, table, tag
from .operands import Operands

LEMMA_NOTE = (
    "Rule {rule} allows scales below amax/6, so values can be clipped and the lemma <e_dz, e_scale> = <e_dz, e_grid> = 0 "
    "does not hold: the parts still add up to the error, but their cross terms are not zero. Clipping is shown as a "
    "fourth part."
)


def lemma_rules(operands: Operands) -> list[str]:
    """Scale rules in the trace under which the deadzone isn't orthogonal to the rest."""
    return [rule for rule in sorted(set(operands.totals["rule"])) if rule in _RULES and not get_rule(rule).covers_amax]


_RULES = {rule.value for rule in type(get_rule("rceil"))}


def section(operands: Operands, thresholds: Thresholds) -> Html:
    lemma = join([tag("p", tag("b", "Lemma. "), LEMMA_NOTE.format(rule=rule)) for rule in lemma_rules(operands)])
    prose = tag("div", lemma, *[tag("div", tag("h3", title), *body) for title, body in _TEXTS], class_="prose columns")
    return card("Methods", prose, _raw(operands), _thresholds(thresholds), id="methods", class_="long")


def _formula(text: str) -> Html:
    return tag("div", text, class_="formula")


def _p(text: str) -> Html:
    return tag("p", text)


_TEXTS: list[tuple[str, list[Html]]] = [
    (
        "Words",
        [
            tag("p", basis("measured"), " computed from tensors of this run. ", basis("predicted"), " follows from measured tensors through a formula. ",
                basis("associated"), " happened at the same time; no cause is claimed."),  # fmt: skip
        ],
    ),
    (
        "Three exact parts of the rounding error",
        [
            _formula("e       = Q(x) − x = e_scale + e_dz + e_grid\ne_scale = Q(x) − Q*(x)\ne_dz    = Q*(x) − x  where Q*(x) = 0, x ≠ 0\ne_grid  = Q*(x) − x  elsewhere"),
            _p("Q is MXFP4 with power-of-two scales s on blocks of 32; Q* has the ideal real scale s* = amax/6. Source: arXiv 2605.20402."),
        ],
    ),
    (
        "Remainder split",
        [
            _formula("scale    = 1 − ‖Q*(x) − x‖² / ‖e‖²\ndeadzone = ‖e_dz‖² / ‖e‖²\ngrid     = ‖e_grid‖² / ‖e‖²"),
            _p("Adds to 1. Scale is what ideal scales would remove; it is negative where powers of two did better. Sums over steps, rows "
               "and layers are added first and divided last."),
        ],
    ),
    (
        "Output error",
        [
            _formula("out_error = ‖E_X Wᵀ‖² / ‖X Wᵀ‖²     (the same for W, and for dgrad and wgrad)"),
            _p("The error of a tensor is not the error of its product: one outlier channel makes a tensor's relative error small and its "
               "product's large. The split of the output error is the remainder split through the GEMM, where the deadzone and grid parts "
               "correlate; their cross term is shared equally. “Made on zeroed values” is the output error of those elements alone."),
        ],
    ),
    (
        "Gaussian reference",
        [_p("What MXFP4 does to Gaussian data of the tensor's own root mean square, by numerical integration: about 18.8 dB, and 10.7 % to "
            "11.7 % of values rounded to zero. A level says little without it.")],
    ),
    (
        "Realised and predicted",
        [
            _formula("realised  = ‖y − b − x Wᵀ‖² / ‖x Wᵀ‖²\npredicted = ‖Q(x) Q(W)ᵀ − x Wᵀ‖² / ‖x Wᵀ‖²"),
            _p("On sampled rows, W being the trainer's current weight, Q the recipe that reproduces y best. Mismatch is the median over modules "
               "of |realised in rollout − realised in training|."),
        ],
    ),
    (
        "Gain, recovery, agreement",
        [_p("Gain is the part of the output error that a correction removes, measured by applying it to the tensors at hand; its interval is a t "
            "interval over probed steps. Recovery is the part of the named component that it mends. Resample agreement is the share of bootstrap "
            "resamples of the probed steps that end in the same decision; it is not a probability that the verdict is right.")],
    ),
]  # fmt: skip


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
    head = ["operand", "‖e_scale‖²", "‖e_dz‖²", "‖e_grid‖²", "2⟨cross⟩", "cos(scale, grid)", "gain of Q", "gain of Q*"]
    note = tag(
        "p",
        "Relative to ‖e‖². These are not shares: e_scale and e_grid are anti-correlated, so the first exceeds 1 on any tensor.",
        class_="note",
    )
    summary = tag("summary", "Raw ratios, for comparison with the paper")
    return tag("details", summary, table(head, rows, numeric=range(1, 8)), note)


def _thresholds(thresholds: Thresholds) -> Html:
    rows = [[tag("code", name), number(float(value))] for name, value in vars(thresholds).items()]
    return tag(
        "details", tag("summary", "Thresholds of the verdict"), table(["threshold", "value"], rows, numeric=(1,))
    )
