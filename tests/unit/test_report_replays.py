"""What a page takes from replays, gradients and log-probabilities, and that it says so where a trace has none."""

import math
import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from mxprobe.attribution.exclusion import exclusion_curve
from mxprobe_reports import Report, gradient_errors, logprobs, shell, symptoms
from tests import report_frames
from tests.unit.test_report_page import text_of

NAMES = report_frames.module_names(1)
STEPS = list(range(20, 241, 20))
WORST = NAMES[3]  # o_proj: no outliers, so not the largest output error


def report(**overrides: Any) -> Report:
    return Report.of(report_frames.inputs(n_layers=1, **overrides))


@pytest.fixture(scope="module")
def replayed() -> Report:
    return report(
        sensitivity=report_frames.sensitivity(NAMES, worst=WORST),
        gradients=report_frames.gradients(NAMES, STEPS),
        rollouts=report_frames.rollouts(STEPS),
    )


def test_where_it_hurts_is_the_predicted_kl_where_it_was_measured(replayed: Report) -> None:
    html = replayed.render()
    hurts = html[html.index(">Where it hurts<") : html.index(">Where the error is<")]
    assert "predicted, KL of each operand alone" in hurts
    assert "from 8 replayed microbatches" in hurts
    assert "No replay says whether first order holds" in hurts
    first = re.search(r'id="worst".*?<tr>(.*?)</tr>', hurts, flags=re.S)
    assert first is not None
    assert WORST in first[1]
    assert ">0.01<" in first[1]
    assert replayed.page_data()["hurts"] == "predicted_kl"
    selected = replayed.page_data()["selected"]
    assert replayed.operands.modules[selected["module"]] == WORST


def test_where_replays_disagree_it_is_the_output_error_and_the_note_says_why() -> None:
    # The operands predict 0.0113 nats together; the replay made 1.
    arms = {"step": [0, 10], "arm": ["q", "q"], "n_tokens": [100.0, 100.0], "sum_kl": [100.0, 100.0]}
    found = report(
        sensitivity=report_frames.sensitivity(NAMES, worst=WORST), replays=report_frames.frame("replays", arms)
    )
    assert found.page_data()["hurts"] == "out_error"
    assert "Replays do not confirm that first order holds" in text_of(found.render())
    assert "predicted_kl" in [measure["key"] for measure in found.page_data()["measures"]]


def test_a_trace_without_replays_says_how_to_get_them() -> None:
    text = text_of(report().render())
    assert "How much the policy feels each was not measured (attach with --sensitivity-every)." in text
    assert "the sampling noise of the gradient, which was not measured here" in text


def test_gradient_error_stands_beside_the_sampling_noise(replayed: Report) -> None:
    rows = replayed.gradients
    assert len(rows) == len(NAMES)
    assert rows["total"].tolist() == pytest.approx([0.02] * len(NAMES))
    assert rows["noise"].tolist() == pytest.approx([0.3] * len(NAMES))
    assert not rows["is_withheld"].any()
    assert "the median error is 0.02, the median sampling noise 0.3" in text_of(replayed.render())
    assert "the sampling noise of the gradient, and whether" not in text_of(replayed.render())


def test_a_gradient_that_is_mostly_noise_is_not_attributed() -> None:
    noisy = report(gradients=report_frames.gradients(NAMES, STEPS, noise=0.95))
    assert noisy.gradients["is_withheld"].all()
    assert f"In {len(NAMES)} of them the gradient is mostly noise" in text_of(noisy.render())
    assert gradient_errors.page_data(report().gradients) is None


def test_mismatch_is_that_of_log_probabilities_where_they_were_measured(replayed: Report) -> None:
    signal = next(each for each in replayed.signals if each.id == "mismatch")
    assert signal.values.tolist() == pytest.approx([0.2] * len(STEPS))
    assert signal.detail.startswith("nats a token")
    text = text_of(replayed.render())
    assert "Log-probabilities of rollout and trainer" in text
    # n = 1200, w sums to n, w^2 to 1.2 n: 1 / 1.2 of the sample is left.
    assert "83.3 %" in text
    assert logprobs.section(report_frames.rollouts([])) == ""


def test_tokens_compared_by_two_sources_are_counted_once() -> None:
    rows = report_frames.rollouts(STEPS)
    twice = pd.concat([rows.assign(source="generation"), rows[rows["step"] > 100].assign(source="trl", sum_abs_d=1e3)])
    by_step = logprobs.mismatch_by_step(twice)
    assert by_step.tolist() == pytest.approx([0.2] * len(STEPS))
    assert not math.isnan(by_step.iloc[0])


def test_what_keeping_modules_out_buys_is_drawn_with_its_knee() -> None:
    sensitivity = report_frames.sensitivity(NAMES, worst=WORST)
    curve = exclusion_curve(sensitivity, report_frames.modules_table(NAMES))
    assert curve is not None
    inputs = report_frames.inputs(n_layers=1, sensitivity=sensitivity)
    found = Report.of(replace(inputs, recommendation=replace(inputs.recommendation, exclusion=(curve,))))
    text = text_of(found.render())
    # 14 operands of 1e-4 nats but one of 1e-2: keeping its module, W and all, leaves 12 of them.
    assert "1 of 7 modules, 14.3 % of their forward GEMM work, take the predicted KL from 0.0113 to 0.0012" in text
    (drawn,) = found.page_data()["exclusion"]
    assert (drawn["knee"], drawn["module"][1], len(drawn["kl"])) == (1, WORST, 8)
    assert drawn["kl"][1] == pytest.approx(1.2e-3)
    assert "What keeping modules out" not in text_of(report().render())


def test_events_are_drawn_unless_there_are_too_many_of_a_kind() -> None:
    kinds = ["attached", "recipe", *["checkpoint_saved"] * 20, "learning_rate"]
    columns = {"step": list(range(len(kinds))), "kind": kinds, "detail": ["x" * 300] * len(kinds)}
    drawn = symptoms.marked_events(report_frames.frame("events", columns))
    assert [(each["step"], each["kind"]) for each in drawn] == [(0, "attached"), (1, "recipe")]
    assert len(drawn[0]["detail"]) == 80


def test_every_link_of_the_page_has_its_target(replayed: Report) -> None:
    for page in (replayed, report()):
        html = page.render().replace(shell.get_plotlyjs(), "")
        targets = set(re.findall(r'href="#([^"]+)"', html))
        assert {"help", "coverage", "methods", "error"} <= targets
        assert targets <= set(re.findall(r' id="([^"]+)"', html))
