"""Jobs that call the model on growing sequences, without a KV cache: that is seen, measured and judged as a rollout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizer_hooks

import mxprobe
from mxprobe.agent import worker
from mxprobe.attribution import Recommendation, Thresholds, recommend
from mxprobe.measuring.recipes import quantize
from mxprobe.schema import Verdict
from mxprobe.trace import TraceWriter, open_trace
from tests.integration.test_mismatch import N_NEW, Loop, attend, policy
from tests.standin_controller import agent_thread, controlled, wait_for
from tests.synthetic import columns_of

BATCH, PROMPT, DRAWN, VOCABULARY, WIDTH = 8, 6, 4, 64, 64
N_PROBED = 9
MX = "mxfp4+rceil"


class RoundedLinear(nn.Linear):
    """Rounds both operands where it is told to, as a rollout written by hand does."""

    recipe = "none"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(quantize(input, self.recipe), quantize(self.weight, self.recipe))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = RoundedLinear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = RoundedLinear(2 * WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.lm_head(x + self.down_proj(F.gelu(self.up_proj(self.norm(x.cumsum(1))))))


class Job:
    """GRPO in a few lines: sampled, scored by the old policy, trained on."""

    def __init__(self, rollout: str) -> None:
        torch.manual_seed(0)
        self.model = Policy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._rollout = rollout

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor) -> torch.Tensor:
        ids = prompts
        RoundedLinear.recipe = self._rollout
        for _ in range(DRAWN):
            ids = torch.cat([ids, torch.multinomial(self.model(ids)[:, -1].softmax(-1), 1)], 1)
        RoundedLinear.recipe = "none"
        return ids

    def step(self) -> None:
        ids = self.sample(torch.randint(0, VOCABULARY, (BATCH, PROMPT)))
        with torch.no_grad():
            old = self.log_probs(ids)
        ratio = (self.log_probs(ids) - old).exp()
        (-(ratio * torch.randn(BATCH, 1)).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


class AtOnce(Job):
    """Draws all tokens from one forward: nothing says that this is a generation."""

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor) -> torch.Tensor:
        RoundedLinear.recipe = self._rollout
        drawn = torch.multinomial(self.model(prompts)[:, -1].softmax(-1), DRAWN)
        RoundedLinear.recipe = "none"
        return torch.cat([prompts, drawn], 1)


class Declared(AtOnce):
    def sample(self, prompts: torch.Tensor) -> torch.Tensor:
        with mxprobe.rollout(self.model):
            return super().sample(prompts)


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FLUSH_EVERY_S", 0.01)


Rows = dict[str, list[dict[str, Any]]]


def attached(job: Job, directory: Path, **options: Any) -> tuple[Rows, Recommendation]:
    """What an agent beside the job tells, and the verdict on it."""
    config = {"every": 2, "weights_every": 2, "sensitivity_every": 0, "max_overhead": 0.0, **options}
    with controlled(directory, **config) as controller, agent_thread(controller):
        wait_for(lambda: bool(optimizer_hooks._global_optimizer_post_hooks), "the agent does not watch")
        wait_for(lambda: job.step() or n_probed(controller.rows) >= N_PROBED, "too few probed steps")
        controller.send({"verb": "detach"})
        wait_for(lambda: job.step() or controller.closed.is_set(), "the agent stays")
    rows = controller.rows
    assert not [row for row in rows["events"] if row["kind"] == "error"]
    with TraceWriter(directory / "run.mxprobe", {"role": "trainer"}) as writer:
        for table, found in rows.items():
            writer.append(table, columns_of(found))
    return rows, recommend(open_trace(directory / "run.mxprobe"), Thresholds().replace(n_resamples=20))


def n_probed(rows: Rows) -> int:
    return sum(row["probed"] for row in rows.get("overhead", []))


def recipes(rows: Rows, phase: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows["outputs"]:
        if row["phase"] == phase:
            found.setdefault(row["module"], set()).add(row["recipe_x"])
    return found


def told(rows: Rows) -> list[str]:
    return [row["detail"] for row in rows["events"] if row["kind"] == "phases"]


HIGH = {"up_proj": {"none"}, "down_proj": {"none"}, "lm_head": {"none"}}


def test_a_quantized_rollout_is_seen_as_a_rollout(tmp_path: Path):
    rows, answer = attached(Job(MX), tmp_path)
    assert recipes(rows, "rollout") == {"up_proj": {MX}, "down_proj": {MX}, "lm_head": {"none"}}
    assert recipes(rows, "train") == recipes(rows, "eval") == HIGH
    of_rollout = [row for row in rows["outputs"] if row["phase"] == "rollout"]
    assert {row["n_rows"] for row in of_rollout} == {BATCH * PROMPT}  # the first forward of each, once a step
    last = {row["module"]: row for row in rows["modules"]}
    assert last["up_proj"]["rollout_rows"] == BATCH * sum(range(PROMPT, PROMPT + DRAWN))
    assert told(rows) == [
        f"training 1, rollout by growing sequences {DRAWN}, old or reference log-probabilities by the tokens of a "
        "training batch 1, not recognised 0"
    ]
    assert answer.verdict not in (Verdict.NOTHING_QUANTIZED, Verdict.NOT_ENOUGH_EVIDENCE, Verdict.NONE_NEEDED)


def test_its_healthy_twin_stays_quiet(tmp_path: Path):
    rows, answer = attached(Job("none"), tmp_path)
    assert recipes(rows, "rollout") == recipes(rows, "train") == HIGH
    assert answer.verdict is Verdict.NOTHING_QUANTIZED  # seen on both sides
    assert not [row for row in rows["events"] if row["kind"] == "weight_noise"]


@pytest.mark.parametrize(
    ("make", "options"),
    [(Declared, {}), (AtOnce, {"rollout_in": ("sample",)}), (AtOnce, {"rollout_in": (f"{__name__}.sample",)})],
)
def test_what_cannot_be_recognised_can_be_declared(make: Callable[[str], Job], options: dict[str, Any], tmp_path: Path):
    rows, answer = attached(make(MX), tmp_path, **options)
    assert recipes(rows, "rollout") == {"up_proj": {MX}, "down_proj": {MX}, "lm_head": {"none"}}
    assert answer.verdict not in (Verdict.NOTHING_QUANTIZED, Verdict.NOT_ENOUGH_EVIDENCE, Verdict.NONE_NEEDED)


def test_what_was_not_recognised_is_said_and_nothing_is_claimed_of_it(tmp_path: Path):
    rows, answer = attached(AtOnce(MX), tmp_path)
    assert recipes(rows, "rollout") == {}
    assert answer.verdict is Verdict.NOT_ENOUGH_EVIDENCE
    assert "no generation was recognised" in answer.headline
    assert "--rollout-in" in answer.what_would_change


def test_generate_without_a_cache_has_log_probabilities_too(tmp_path: Path):
    model = policy(rollout="none", outliers=0.0)
    model.generation_config.use_cache = False
    loop = Loop(model, fused=False, padded_prompts=False)
    with controlled(tmp_path, every=3, weights_every=3, whatifs=()) as controller:
        rows = attend(controller, loop, n=6)
    assert not [row for row in rows["events"] if row["kind"] == "error"]
    assert told(rows)[0].startswith(f"training 1, rollout by generate() on the stack {N_NEW}")
    measured = [row for row in rows["rollouts"] if row["stratum"] == "all"]
    assert measured
    assert all(row["n_unmatched"] == 0 and row["max_abs_d"] < 1e-4 for row in measured)
    layers = {row["module"] for row in rows["outputs"] if row["phase"] == "rollout"}
    assert len(layers) >= 14
