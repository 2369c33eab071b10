"""How stable the decision is: the same decision on resampled and on halved data.

Resample agreement is what it is called: the share of bootstrap resamples that end alike. It is no probability
of being right.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .correction_scores import held_out
from .decision import Decision, decide
from .measured import Measured
from .recommendation import Agreement, CorrectionScore
from .thresholds import Thresholds

_SEED = 0x6D787072


def resample_agreement(measured: Measured, decision: Decision, thresholds: Thresholds) -> Agreement:
    """Repeat the whole decision on resamples of the clusters, drawn with replacement from a private seed.

    None with fewer than two clusters: there is nothing to resample.
    """
    n_clusters = measured.n_clusters
    if n_clusters < 2:
        return Agreement(None, measured.steps.size, 0)
    generator = np.random.default_rng(_SEED)
    draws = generator.multinomial(n_clusters, np.full(n_clusters, 1.0 / n_clusters), size=thresholds.n_resamples)
    wanted = decision.signature()
    same = sum(_again(measured, weights, thresholds).signature() == wanted for weights in draws)
    return Agreement(same / len(draws), measured.steps.size, len(draws))


def _again(measured: Measured, weights: npt.NDArray[np.int64], thresholds: Thresholds) -> Decision:
    return decide(measured, weights.astype(float), thresholds, with_whatifs=False)


def with_held_out_gains(measured: Measured, decision: Decision, thresholds: Thresholds) -> tuple[CorrectionScore, ...]:
    """Return scores with the gain on data that did not choose the operands.

    Even clusters choose and odd ones score, then the other way round.

    None where a half has fewer than two clusters, or names other operands than the other half can score.
    """
    even = (np.arange(measured.n_clusters) % 2 == 0).astype(float)
    halves = (even, 1.0 - even)
    if min(float(half.sum()) for half in halves) < 2:
        return decision.scores
    choices = [(decide(measured, half, thresholds), other) for half, other in (halves, halves[::-1])]
    scored: list[CorrectionScore] = []
    for score in decision.scores:
        gains = [
            held_out(choice.situation, other, choice.named, score.correction)
            for choice, other in choices
            if choice.situation is not None and choice.named.any()
        ]
        finite = [gain for gain in gains if np.isfinite(gain)]
        scored.append(replace(score, held_out_gain=float(np.mean(finite)) if finite else None))
    return tuple(scored)
