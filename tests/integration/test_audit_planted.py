"""Planted pitfalls in small emulated runs: the audit names each one, and nothing on a healthy run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch.optim import optimizer as optimizer_hooks

from mxprobe.agent import worker
from mxprobe.audit import PITFALLS, audit
from mxprobe.cli import main
from mxprobe.measuring.recipes import quantize
from mxprobe.trace import TraceWriter, open_trace
from tests.standin_controller import agent_thread, controlled, wait_for
from tests.unit.test_audit_quantizers import LINEARS, QUANTIZERS

WIDTH = 64
MX = "mxfp4+rceil"
N_PROBED = 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 32, bias=False)
        self.gate_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.gate(x).softmax(-1).mean(-1, keepdim=True)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) * routed


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = Mlp()
        self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q_proj(x)
        return self.lm_head(x + self.mlp(x))


BODY = ("q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EVERYWHERE = ("train", "rollout", "eval")


@dataclass
class Plan:
    """What each module computes: recipes by (module, phase), `none` where not named; what is wrong with its weights."""

    recipes: dict[tuple[str, str], str] = field(default_factory=dict)
    lag: dict[str, int] = field(default_factory=dict)
    """In rollout, steps behind."""
    wrong: dict[str, str] = field(default_factory=dict)
    """In rollout: `transposed`, `permuted`, `other`."""
    noisy_in_evaluation: tuple[str, ...] = ()
    """Modules with Gaussian noise of 2 % on their weights there."""
    cuts_gradient: dict[str, str] = field(default_factory=dict)
    """Modules whose quantizer lets no gradient through to their input: `detached` from the graph, or of `zeros`."""

    def but(self, recipes: Mapping[tuple[str, str], str] | None = None, **changes: Any) -> Plan:
        return replace(self, recipes={**self.recipes, **(recipes or {})}, **changes)


HEALTHY = Plan({(name, phase): MX for name in BODY for phase in EVERYWHERE})


class Emulation:
    """Gives every Linear of a policy the forward of a plan, written by hand."""

    def __init__(self, policy: Policy, plan: Plan) -> None:
        self.phase = "rollout"
        self.plan = plan
        self.modules = {name: m for name, m in policy.named_modules() if isinstance(m, nn.Linear)}
        self.past: list[dict[str, torch.Tensor]] = []
        self.other = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / 8
        for name, module in self.modules.items():
            module.forward = self._forward(name, module)  # pyright: ignore[reportAttributeAccessIssue]

    def remember(self) -> None:
        self.past.append({name: m.weight.detach().clone() for name, m in self.modules.items()})

    def _forward(self, name: str, module: nn.Linear) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            phase = "train" if torch.is_grad_enabled() else self.phase
            w = self._weight(name, module) if phase == "rollout" else module.weight
            if phase == "eval" and name in self.plan.noisy_in_evaluation:
                w = w + 0.02 * w.detach().std() * torch.randn_like(w)
            recipe = self.plan.recipes.get((name, phase), "none")
            cut = self.plan.cuts_gradient.get(name)
            y = F.linear(x.detach() if cut == "detached" else x.detach() + 0.0 * x if cut == "zeros" else x, w)
            rounded = F.linear(quantize(x.detach(), recipe), quantize(w.detach(), recipe))
            return y + (rounded - y).detach()

        return forward

    def _weight(self, name: str, module: nn.Linear) -> torch.Tensor:
        wrong = self.plan.wrong.get(name)
        if wrong == "transposed":
            return module.weight.T.contiguous()
        if wrong == "permuted":
            return module.weight.flip(0)
        if wrong == "other":
            return self.other
        lag = self.plan.lag.get(name, 0)
        return self.past[max(len(self.past) - 1 - lag, 0)][name]


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FLUSH_EVERY_S", 0.01)


def record(plan: Plan, directory: Path) -> Path:
    """The trace of a run of the plan, attached to for `N_PROBED` probed steps at least."""
    torch.manual_seed(0)
    policy = Policy()
    emulation = Emulation(policy, plan)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)

    def step() -> None:
        emulation.remember()
        with torch.no_grad():
            emulation.phase = "rollout"
            for length in (6, 1, 1):
                policy(torch.randn(8, length, WIDTH))
            emulation.phase = "eval"
            policy(torch.randn(4, 6, WIDTH))
        policy(torch.randn(8, 8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with controlled(directory, every=2, whatifs=(), weights_every=100) as controller:
        with agent_thread(controller):
            wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")

            def is_done() -> bool:
                attached, n_told = controller.attached.is_set(), len(controller.rows.get("overhead", []))
                step()
                if attached:  # measured before the next step, so that every version of the weights is kept
                    wait_for(lambda: len(controller.rows.get("overhead", [])) > n_told, "the step was not told of")
                rows = [row for row in controller.rows.get("outputs", []) if row["phase"] == "rollout"]
                return len({row["step"] for row in rows}) > N_PROBED

            wait_for(is_done, "too few probed steps")
            controller.send({"verb": "detach"})
            deadline = time.monotonic() + 20
            while not controller.closed.is_set() and time.monotonic() < deadline:
                step()
        assert not [row for row in controller.rows.get("events", []) if row["kind"] == "error"]
        writer = TraceWriter(directory / "run.mxprobe", {})
        for table, rows in controller.rows.items():
            writer.append(table, {name: [row[name] for row in rows] for name in rows[0]})
        writer.close()
    return directory / "run.mxprobe"


PLANTED: dict[str, tuple[Plan, dict[str, set[str]]]] = {
    "floor_div in the rollout of all": (
        HEALTHY.but({(name, "rollout"): "mxfp4+floor_div" for name in BODY}),
        {"floor_div": set(BODY), "recipe_mismatch": set(BODY)},
    ),
    "a rule of one side": (
        HEALTHY.but({(name, "rollout"): "mxfp4+floor" for name in BODY}),
        {"recipe_mismatch": set(BODY)},
    ),
    "the router, on both sides": (
        HEALTHY.but({("mlp.gate", phase): MX for phase in EVERYWHERE}),
        {"router_quantized": {"mlp.gate"}},
    ),
    "the lm_head, on both sides": (
        HEALTHY.but({("lm_head", phase): MX for phase in EVERYWHERE}),
        {"head_quantized": {"lm_head"}},
    ),
    "evaluation in high precision": (
        HEALTHY.but({(name, "eval"): "none" for name in BODY}),
        {"evaluation_not_quantized": set(BODY)},
    ),
    "quantization noise left on in evaluation": (
        HEALTHY.but(noisy_in_evaluation=BODY),
        {"evaluation_perturbed": set(BODY)},
    ),
    "an exclude pattern that takes gate_proj along with the router": (
        HEALTHY.but({("mlp.gate_proj", phase): "none" for phase in EVERYWHERE}),
        {"exclude_by_substring": {"mlp.gate_proj"}},
    ),
    "the rollout alone": (
        HEALTHY.but({(name, "train"): "none" for name in BODY}),
        {"one_side_only": set(BODY)},
    ),
    "one layer left out in rollout": (
        HEALTHY.but({("mlp.down_proj", phase): "none" for phase in ("rollout", "eval")}),
        {"left_out": {"mlp.down_proj"}, "evaluation_not_quantized": {"mlp.down_proj"}},
    ),
    "one layer by another rule": (
        HEALTHY.but({("mlp.up_proj", phase): "mxfp4+even" for phase in EVERYWHERE}),
        {"mixed_recipes": {"mlp.up_proj"}},
    ),
    "all weights two steps old": (
        HEALTHY.but(lag=dict.fromkeys((*BODY, "mlp.gate", "lm_head"), 2)),
        {"stale_weights": {*BODY, "mlp.gate", "lm_head"}},
    ),
    "one layer not refitted": (
        HEALTHY.but(lag={"mlp.up_proj": 2}),
        {"partial_refit": {"mlp.up_proj"}},
    ),
    "one layer transposed, another permuted": (
        HEALTHY.but(wrong={"q_proj": "transposed", "mlp.up_proj": "permuted"}),
        {"reordered_weights": {"q_proj", "mlp.up_proj"}},
    ),
    "weights of another model": (
        HEALTHY.but(wrong={"q_proj": "other"}),
        {"unknown_weights": {"q_proj"}},
    ),
    "no straight-through estimator, out of the graph": (
        HEALTHY.but(cuts_gradient={"mlp.down_proj": "detached"}),
        {"zero_gradient": {"mlp.gate_proj", "mlp.up_proj"}},
    ),
    "no straight-through estimator, a derivative of 0": (
        HEALTHY.but(cuts_gradient={"mlp.down_proj": "zeros"}),
        {"zero_gradient": {"mlp.gate_proj", "mlp.up_proj"}},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pitfall_is_named_and_nothing_else(name: str, tmp_path: Path):
    plan, expected = PLANTED[name]
    found: dict[str, set[str]] = {}
    for finding in audit(open_trace(record(plan, tmp_path))).findings:
        found.setdefault(finding.pitfall.slug, set()).update(finding.modules)
    assert found == expected


def test_a_healthy_run_is_clean_and_the_command_says_what_is_quantized(tmp_path: Path):
    trace = record(HEALTHY, tmp_path)
    result = audit(open_trace(trace))
    assert result.is_clean, result.findings
    sides = {m.module: m for m in result.modules}
    for name in BODY:
        rollout = sides[name].rollout
        assert rollout is not None
        assert (rollout.recipe, rollout.weight_lag) == ((MX, MX), 0)
    shown = CliRunner().invoke(main, ["audit", str(trace)])
    assert shown.exit_code == 0
    assert "No known pitfall found" in shown.output
    assert "mxfp4 rceil" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100
    data = json.loads(CliRunner().invoke(main, ["audit", str(trace), "--json"]).output)
    assert data["schema"] == "mxprobe.audit/1"
    assert data["findings"] == []


def test_every_pitfall_that_a_run_can_show_is_planted():
    """Elsewhere: non-finite values in tests/unit/test_audit.py, since a run that has them cannot train; an expert that
    differs in test_moe_experts.py, a weight that flipped on its way to an engine in test_engines.py."""
    of_quantizers = {slug for _, expected in QUANTIZERS.values() for slug in expected}
    of_quantizers |= {slug for expected in LINEARS.values() for slug in expected}
    in_runs = {slug for _, expected in PLANTED.values() for slug in expected}
    assert in_runs | of_quantizers == set(PITFALLS) - {"nonfinite", "expert_differs", "flipped_weights"}
