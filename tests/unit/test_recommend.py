"""`mxprobe recommend`: the screen, the JSON, the snippets, and what wrong input says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from rich.console import Console

from mxprobe.attribution import CorrectionScore, OperandGroup, Recommendation, Thresholds, recommend
from mxprobe.attribution.costs import cost_of, tier_of
from mxprobe.attribution.recommendation import JSON_SCHEMA
from mxprobe.attribution.snippets import FRAMEWORKS, TORCH_FRAMEWORKS, Emulated, has_option, snippet_for
from mxprobe.cli import main
from mxprobe.cli.recommend import show
from mxprobe.errors import EXIT_TRACE, EXIT_USAGE, UsageError
from mxprobe.measuring.recipes import Call, infer_recipe
from mxprobe.schema import Component, Role
from mxprobe.trace import TraceWriter, open_trace
from mxprobe_kernels import apply_correction, quantize_dequantize
from mxprobe_kernels.recipe_grammar import DEFAULT_WHATIFS
from tests import synthetic

DOCS = Path(__file__).parents[2] / "docs"
NAMEABLE = (*DEFAULT_WHATIFS, "rule:oas", "rule:rceil", "keep_high_precision")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_trace(tmp_path_factory.mktemp("trace") / "run.mxprobe", synthetic.OUTLIERS)


@pytest.fixture(scope="module")
def recommendation(trace: Path) -> Recommendation:
    return recommend(open_trace(trace), Thresholds().replace(n_resamples=10))


@pytest.fixture
def run() -> Callable[..., object]:
    return lambda *arguments: CliRunner().invoke(main, ["recommend", *map(str, arguments)])


def group(kind: str, role: Role = Role.X_FWD) -> OperandGroup:
    return OperandGroup(role, kind, (f"model.{kind}",), 0.5, Component.DEADZONE, {})


def rendered(recommendation: Recommendation, width: int = 80, **options: bool) -> str:
    out = StringIO()
    show(recommendation, console=Console(file=out, width=width, highlight=False), **options)
    return out.getvalue()


def test_the_answer_fits_one_screen(recommendation: Recommendation) -> None:
    text = rendered(recommendation)
    lines = text.splitlines()
    assert len(lines) <= 50
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("ENABLE A CORRECTION: Deadzone in the inputs of q_proj")
    assert "resample agreement 1.00 (n = 8)" in text
    assert "What would change this." in text
    assert "…" not in text
    named = [line for line in lines if "named" in line and "of:" in line]
    assert len(named) == 1
    assert "measured:" in text
    assert "predicted:" in text


def test_no_number_is_cut_off_on_a_narrow_terminal(recommendation: Recommendation) -> None:
    worse = replace(recommendation.corrections[0], gain=-0.09, gain_low=-0.16, gain_high=-0.02, held_out_gain=-0.11)
    curing = [replace(score, cures=True) for score in recommendation.corrections]
    text = rendered(replace(recommendation, corrections=(worse, *curing)))
    assert "…" not in text
    assert re.search(r"−0\.09 \[−0\.16, −0\.02\] +−0\.11", text)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_explain_shows_everything(recommendation: Recommendation) -> None:
    text = re.sub(r"\s+", " ", rendered(recommendation, explain=True, with_snippet=True))
    for evidence in recommendation.evidence:
        assert evidence.text in text
    for caveat in recommendation.caveats:
        assert caveat in text
    assert "min_recovery = 0.5" in text
    assert "class StraightThrough" in text


def test_names_are_not_markup(recommendation: Recommendation) -> None:
    hostile = replace(recommendation, headline="Deadzone in mlp[up] and [bold]x[/bold] [/]", what_would_change="[red]y")
    text = rendered(hostile)
    assert "mlp[up] and [bold]x[/bold] [/]" in text
    assert "[red]y" in text


def test_json_is_what_the_document_says(recommendation: Recommendation) -> None:
    data = recommendation.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema"] == JSON_SCHEMA
    assert data["verdict"] == "enable"
    assert {(g["kind"], g["role"]) for g in data["where"]["groups"]} == {
        (kind, "x_fwd") for kind in synthetic.FED_BY_NORM
    }
    assert [c["correction"] for c in data["corrections"] if c["named"]] == list(recommendation.chosen)
    documented = (DOCS / "recommend-json.md").read_text()
    for name in (*data, *data["where"]["groups"][0], *data["corrections"][0], *data["evidence"][0], *data["coverage"]):
        assert f"`{name}`" in documented, name
    for field in fields(Thresholds):
        assert f"`{field.name}`" in documented, field.name


def test_json_on_standard_output(run, trace: Path) -> None:
    done = run(trace, "--json", "--threshold", "n_resamples=5", "--threshold", "mismatch=0.9")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["thresholds"]["mismatch"] == 0.9
    assert data["verdict"] == "none_needed"


def test_the_framework_is_found_in_the_trace_or_given(run, trace: Path) -> None:
    found = json.loads(run(trace, "--json", "--threshold", "n_resamples=5").stdout)
    assert found["snippet"]["framework"] == "trl"
    given = run(trace, "--framework", "verl", "--threshold", "n_resamples=5")
    assert given.exit_code == 0
    assert "verl has no option for this" in given.stdout
    assert "def corrected(x):" in given.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--framework", "nanotron"], EXIT_USAGE, "no snippets for framework 'nanotron'"),
        (["--threshold", "mismatch"], EXIT_USAGE, "is not NAME=VALUE"),
        (["--threshold", "mismatch=much"], EXIT_USAGE, "is not NAME=VALUE"),
        (["--threshold", "mismash=1"], EXIT_USAGE, "no threshold named mismash"),
    ],
)
def test_wrong_options_answer_in_words(run, trace: Path, arguments: list[str], code: int, words: str) -> None:
    done = run(trace, *arguments)
    assert done.exit_code == code
    assert words in done.stderr
    assert done.stdout == ""


def test_wrong_traces_answer_in_words(run, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nothing", "no such directory"), (tmp_path, "is not a trace")):
        done = run(path)
        assert done.exit_code == EXIT_TRACE
        assert words in done.stderr
        assert "what to do" in done.stderr
    TraceWriter(tmp_path / "empty", {}).close()
    done = run(tmp_path / "empty")
    assert done.exit_code == EXIT_TRACE
    assert "Not enough evidence" in done.stdout
    assert "The trace is empty" in done.stderr
    assert "nothing was measured" in done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("correction", NAMEABLE)
def test_every_snippet_is_valid(correction: str, framework: str) -> None:
    where = (group("q_proj"), group("net.2", Role.W_FWD), group("q_proj", Role.W_FWD))
    snippet = snippet_for(correction, where, framework, Emulated())
    assert "$" not in snippet.text.replace('$"', "")
    assert all(len(line) <= 120 for line in snippet.text.splitlines())
    if snippet.language == "python":
        ast.parse(snippet.text)
    elif snippet.language == "yaml":
        assert pytest.importorskip("yaml").safe_load(snippet.text)
    else:
        assert snippet.language == "bash"


def test_a_long_list_of_modules_stays_within_the_line() -> None:
    where = [group(f"some_rather_long_projection_{i}") for i in range(40)]
    text = snippet_for("of:0.5", where, "trl", Emulated()).text
    assert all(len(line) <= 120 for line in text.splitlines())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(96, 40)
        self.o_proj = torch.nn.Linear(40, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x))


def enabled(
    correction: str, emulated: Emulated, where: tuple[OperandGroup, ...], framework: str = "torch"
) -> tuple[Net, dict]:
    torch.manual_seed(0)
    net, names = Net(), {}
    exec(snippet_for(correction, where, framework, emulated).text, names)
    names["enable"](net)
    return net, names


@pytest.mark.parametrize(
    ("correction", "framework"),
    [(name, "torch") for name in ("of:0.5", "of:1.0", "mbs:32", "mbs:128")]
    + [("of:0.5", "openrlhf"), ("mbs:128", "openrlhf"), ("of:0.5", "alto"), ("mbs:32", "alto"), ("of:0.5", "miles")],
)
def test_the_snippet_computes_the_correction_bit_for_bit(correction: str, framework: str) -> None:
    net, names = enabled(correction, Emulated(), (group("q_proj"),), framework)
    x = torch.randn(7, 96) * torch.logspace(-6, 6, 7)[:, None]
    assert torch.equal(names["mxfp4"](x), quantize_dequantize(x)[0].float())
    assert torch.equal(names["corrected"](x), apply_correction(x, correction))
    w = quantize_dequantize(net.q_proj.weight)[0].float()
    assert torch.equal(net.q_proj(x), F.linear(apply_correction(x, correction), w, net.q_proj.bias))
    y = torch.randn(3, 40)
    assert torch.equal(net.o_proj(y), F.linear(y, net.o_proj.weight))  # not named: left as it was


def test_the_snippet_rotates_as_the_what_if_does() -> None:
    net, names = enabled("had:32", Emulated(), (group("q_proj"),))
    x = torch.randn(64, 96)
    x[:, 5] *= 50
    assert torch.isclose(names["corrected"](x), apply_correction(x, "had:32"), atol=1e-5).float().mean() > 0.999
    call = Call(x, net.q_proj.weight.detach(), (net.q_proj(x) - net.q_proj.bias).detach())
    recipe, sums = infer_recipe(call)  # what the next trace will say of a run that follows the advice
    assert recipe == ("mxfp4+had:32", "mxfp4+rceil")
    assert sums["exact"]


def test_the_snippet_handles_zeros_and_ties() -> None:
    _, names = enabled("of:0.5", Emulated(), (group("q_proj"),))
    x = torch.zeros(3, 32)
    x[1] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4)
    x[2] = torch.nextafter(torch.tensor(6.0), torch.tensor(7.0))
    assert torch.equal(names["mxfp4"](x), quantize_dequantize(x)[0].float())


def test_the_snippet_trains_straight_through_and_keeps_training_exact_when_asked() -> None:
    net, _ = enabled("of:0.5", Emulated(rollout_only=True), (group("q_proj"), group("o_proj", Role.W_FWD)))
    x = torch.randn(4, 96)
    exact = F.linear(F.linear(x, net.q_proj.weight, net.q_proj.bias), net.o_proj.weight)
    assert torch.equal(net(x), exact)
    with torch.no_grad():
        assert not torch.equal(net(x), exact)
    net, _ = enabled("of:0.5", Emulated(), (group("q_proj"),))
    net(x).sum().backward()
    assert net.q_proj.weight.grad is not None
    assert net.q_proj.weight.grad.abs().sum() > 0


def test_operands_that_the_run_leaves_alone_stay_exact() -> None:
    net, _ = enabled("of:0.5", Emulated(x=False), (group("q_proj", Role.W_FWD),))
    x = torch.randn(4, 96)
    w = apply_correction(net.q_proj.weight, "of:0.5")
    assert torch.equal(net.q_proj(x), F.linear(x, w, net.q_proj.bias))


@pytest.mark.parametrize("correction", ["rule:even", "mxfp8", "nvfp4"])
def test_the_torchao_knob_runs(correction: str) -> None:
    pytest.importorskip("torchao")
    net, names = Net(), {}
    exec(snippet_for(correction, (group("q_proj"),), "trl", Emulated()).text, names)
    names["enable"](net)
    assert type(net.q_proj).__name__ != "Linear"
    assert type(net.o_proj).__name__ == "Linear"


ALTO_KEYS = {
    # the fields of alto.modifiers.lpt.base.LowPrecisionTrainingModifier, and what it takes for them
    "scheme": ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"),
    "two_level_scaling": ("none", "tensorwise", "blockwise"),
    "clip_mode": ("none", "static", "dynamic"),
    **dict.fromkeys(("use_2dblock_x", "use_2dblock_w", "use_hadamard", "use_sr_grad", "use_dge"), (True, False)),
}


def alto_recipe(correction: str, *kinds: str) -> dict:
    text = snippet_for(correction, tuple(group(kind) for kind in kinds), "alto", Emulated()).text
    stage = pytest.importorskip("yaml").safe_load(text)["training_stage"]["lpt_modifiers"]
    assert list(stage) == ["LowPrecisionTrainingModifier"]
    return stage["LowPrecisionTrainingModifier"]


@pytest.mark.parametrize(
    ("correction", "scheme", "scaling"),
    [("mbs:128", "mxfp4", "blockwise"), ("nvfp4", "nvfp4", "tensorwise"), ("mxfp8", "mxfp8_e4m3", "none")],
)
def test_the_keys_for_alto_are_its_own(correction: str, scheme: str, scaling: str) -> None:
    recipe = alto_recipe(correction, "wq")
    assert all(value in ALTO_KEYS[name] for name, value in recipe.items())
    assert (recipe["scheme"], recipe["two_level_scaling"]) == (scheme, scaling)
    assert has_option(correction, "alto")
    assert not has_option("mbs:32", "alto")  # its macro blocks have 128 elements


def test_the_ignore_list_for_alto_leaves_out_these_modules_and_no_other() -> None:
    match = pytest.importorskip("compressed_tensors.utils").match_named_modules  # what ALTO asks
    net = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Net(), Net()]), "output": torch.nn.Linear(2, 2)})
    left = {name for name, _ in match(net, ["Linear"], alto_recipe("keep_high_precision", "q_proj")["ignore"])}
    assert left == {"layers.0.o_proj", "layers.1.o_proj"}


@pytest.mark.parametrize("framework", ["megatron", "slime", "miles", "transformer-engine"])
def test_modules_kept_by_transformer_engine_are_matched_by_globs(framework: str) -> None:
    text = snippet_for("keep_high_precision", (group("linear_qkv"), group("linear_fc1")), framework, Emulated()).text
    found = pytest.importorskip("yaml").safe_load(text)
    assert found["configs"]["bf16"]["training_recipe"] == {}
    patterns = [each["pattern"] for each in found["matchers"].values() if each["config"] == "bf16"]
    names = (
        "decoder.layers.3.self_attention.linear_qkv",
        "decoder.layers.3.mlp.linear_fc1",
        "decoder.l.mlp.linear_fc2",
    )
    assert [any(fnmatchcase(name, pattern) for pattern in patterns) for name in names] == [True, True, False]


def test_unknown_framework_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no snippets") as caught:
        snippet_for("of:0.5", (group("q_proj"),), "nanotron", Emulated())
    assert "megatron" in caught.value.remedy


def test_costs_rank_as_the_hardware_does() -> None:
    order = ["rule:even", "mbs:128", "had:32", "of:0.5", "keep_high_precision"]
    costs = [cost_of(name).cost_gemm for name in order]
    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)
    assert cost_of("mbs:128").bits_per_element == pytest.approx(4.3125)
    assert [tier_of(name) for name in (*order, "nvfp4", "mxfp8")] == [1, 1, 1, 1, 2, 2, 2]
    for name in NAMEABLE:
        assert cost_of(name).note


def test_costs_are_those_of_the_device() -> None:
    assert cost_of("of:0.5", "b200").cost_gemm == cost_of("mxfp8", "b200").cost_gemm == 1.0  # a second FP4 pass, or FP8
    assert cost_of("mxfp8", "b300").cost_gemm == pytest.approx(2.0)
    assert cost_of("keep_high_precision", "b300").cost_gemm == pytest.approx(5.0)
    assert cost_of("mxfp6_e2m3", "mi355").cost_gemm == 0.0
    assert "emulation" in cost_of("nvfp4", "mi355").note
    with pytest.raises(UsageError, match="no rates of device 'tpu'"):
        Thresholds().replace(device="tpu")


def test_the_list_says_what_the_engine_has_and_what_nothing_beats(recommendation: Recommendation) -> None:
    scores = {score.correction: score for score in recommendation.corrections}
    assert scores["rule:even"].engine_has_it  # torchao's fake quantization, under TRL
    assert not scores["mbs:128"].engine_has_it
    for score in scores.values():
        better = [s for s in scores.values() if s.gain >= score.gain and s.cost_gemm < score.cost_gemm]
        assert not (score.is_pareto and better), score.correction
    assert any(score.is_pareto for score in scores.values())


def test_not_finite_numbers_become_null(recommendation: Recommendation) -> None:
    score: CorrectionScore = replace(recommendation.corrections[0], gain_low=float("-inf"), recovery=float("nan"))
    data = replace(recommendation, corrections=(score,)).to_json()
    assert data["corrections"][0]["gain_low"] is None
    assert data["corrections"][0]["recovery"] is None


@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name not in TORCH_FRAMEWORKS])
@pytest.mark.parametrize("correction", NAMEABLE)
def test_an_option_is_claimed_where_the_snippet_has_one(correction: str, framework: str) -> None:
    text = snippet_for(correction, (group("q_proj"),), framework, Emulated()).text
    assert has_option(correction, framework) is (f"{framework} has no option for this" not in text)
