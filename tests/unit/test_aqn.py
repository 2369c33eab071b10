"""Adaptive quantization noise: its schedule, what it touches, and that the trained weights come back bit for bit."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

import mxprobe
from mxprobe.emulation import NoiseSchedule, QuantizationNoise, Recipe
from mxprobe.emulation.trl import scale_is_uncorrected
from mxprobe.errors import UsageError


class TinyRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = TinyRMSNorm(4096)
        self.proj = nn.Linear(4096, 8)
        self.lm_head = nn.Linear(8, 4)
        self.seen: list[torch.Tensor] = []

    def generate(self) -> None:
        self.seen.append(self.norm.weight.detach().clone())


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy()


def test_the_schedule_is_zero_then_geometric() -> None:
    schedule = NoiseSchedule(1e-2, 1e-4, stages=10)
    sigmas = [schedule.sigma((stage + 0.5) / 10) for stage in range(10)]
    assert sigmas[0] == 0.0
    assert sigmas[1] == pytest.approx(1e-2)
    assert sigmas[9] == pytest.approx(1e-4)
    ratios = [later / earlier for earlier, later in pairwise(sigmas[1:])]
    assert ratios == pytest.approx([(1e-4 / 1e-2) ** (1 / 8)] * 8)
    assert (schedule.sigma(-1.0), schedule.sigma(2.0)) == (0.0, sigmas[9])
    assert [NoiseSchedule(stages=2).sigma(p) for p in (0.2, 0.7)] == [0.0, 1e-2]
    with pytest.raises(UsageError, match="at least two stages"):
        NoiseSchedule(stages=1)


def test_weights_come_back_bit_for_bit_and_the_generator_is_private(policy: Policy) -> None:
    policy.bfloat16()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    state = torch.get_rng_state()
    noise = QuantizationNoise(policy)
    assert noise.names == ["norm.weight"]

    def dying_rollout() -> None:
        with noise.rollout(0.15) as sigma:
            assert sigma == noise.sigma == pytest.approx(1e-2)
            assert not torch.equal(policy.norm.weight, before["norm.weight"])
            assert torch.equal(policy.proj.weight, before["proj.weight"])
            raise RuntimeError("rollout died")

    with pytest.raises(RuntimeError, match="rollout died"):
        dying_rollout()
    assert not noise.is_on
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_noise_has_the_scheduled_size_and_is_fresh_each_time(policy: Policy) -> None:
    weight = policy.norm.weight.detach().clone()
    noise = QuantizationNoise(policy, seed=3)
    draws: list[torch.Tensor] = []
    for _ in range(2):
        with noise.rollout(0.15):
            draws.append(policy.norm.weight.detach() - weight)
    for draw in draws:
        assert float(draw.std() / weight.square().mean().sqrt()) == pytest.approx(1e-2, rel=0.05)
    correlation = torch.corrcoef(torch.stack(draws))[0, 1]
    assert abs(float(correlation)) < 0.08
    again = QuantizationNoise(policy, seed=3)
    with again.rollout(0.15):
        assert torch.equal(policy.norm.weight.detach() - weight, draws[0])


def test_adding_twice_replaces_the_noise(policy: Policy) -> None:
    weight = policy.norm.weight.detach().clone()
    noise = QuantizationNoise(policy)
    noise.add(0.15)
    noise.add(0.15)
    noise.restore()
    assert torch.equal(policy.norm.weight, weight)
    assert noise.add(0.05) == 0.0
    assert torch.equal(policy.norm.weight, weight)


def test_noise_in_evaluation_mode_is_flagged_once(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    noise = QuantizationNoise(policy.eval())
    with caplog.at_level(logging.WARNING, logger="mxprobe.aqn"):
        for progress in (0.05, 0.15, 0.25):
            with noise.rollout(progress):
                pass
    assert len(caplog.records) == 1
    assert "on a model in evaluation mode" in caplog.text


def test_noise_on_weights_leaves_the_head(policy: Policy) -> None:
    assert QuantizationNoise(policy, target="weights").names == ["proj.weight"]
    with pytest.raises(UsageError, match="has no RMSNorm weight to put noise on"):
        QuantizationNoise(policy.proj)


def test_generation_is_noisy_in_training_and_clean_in_evaluation(policy: Policy) -> None:
    weight = policy.norm.weight.detach().clone()
    noise = QuantizationNoise(policy)
    noise.progress = 0.5
    with noise.watch_generate():
        policy.train()
        policy.generate()
        policy.eval()
        policy.generate()
    policy.train()
    policy.generate()
    noisy, evaluated, after = policy.seen
    assert not torch.equal(noisy, weight)
    assert torch.equal(evaluated, weight)
    assert torch.equal(after, weight)
    assert "generate" not in policy.__dict__


def test_kept_quantized_weights_see_the_noise(policy: Policy) -> None:
    """Emulation quantizes a weight once per generation: after the noise is on it, whichever was installed first."""
    noise = QuantizationNoise(policy, NoiseSchedule(0.5, 0.1), target="weights")
    x = torch.randn(2, 4096)
    outputs: list[torch.Tensor] = []
    policy.__class__ = type("Generating", (Policy,), {"generate": lambda self: outputs.append(self.proj(x).detach())})
    with torch.no_grad(), mxprobe.emulate(policy, "paper"):
        policy.generate()
        with noise.watch_generate():
            noise.progress = 0.15
            policy.generate()
        policy.generate()
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_wrappers_of_generate_come_off_in_any_order(policy: Policy) -> None:
    noise = QuantizationNoise(policy)
    noise.progress = 0.5
    weight = policy.norm.weight.detach().clone()
    watch = noise.watch_generate()
    watch.__enter__()
    emulation = mxprobe.emulate(policy, "paper")
    watch.__exit__(None, None, None)
    policy.generate()
    emulation.remove()
    policy.generate()
    assert all(torch.equal(seen, weight) for seen in policy.seen)
    assert len(policy.seen) == 2
    with noise.watch_generate(), mxprobe.emulate(policy, "paper") as emulation:
        policy.generate()
    with mxprobe.emulate(policy, "paper") as emulation, noise.watch_generate():
        emulation.remove()
        with mxprobe.emulate(policy, "paper"):
            policy.generate()
    policy.generate()
    assert [torch.equal(seen, weight) for seen in policy.seen[2:]] == [False, False, True]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("paper", True), ("paper fwd=mxfp4/rceil+mbs:128", False), ("nvfp4", False), ("none", False), ("w4a8", True)],
)
def test_noise_before_the_scale_is_fixed_is_recognised(recipe: str, expected: bool) -> None:
    assert scale_is_uncorrected(Recipe.parse(recipe)) is expected


def test_trainer_callback_follows_training_and_warns(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    """The callback driven as transformers drives it: TrainerState, events in order."""
    transformers = pytest.importorskip("transformers")
    callback = mxprobe.emulation.noise_callback(seed=1)
    handler = transformers.trainer_callback.CallbackHandler([callback], policy, None, None, None)
    state = transformers.TrainerState(max_steps=10)
    control = transformers.TrainerControl()
    weight = policy.norm.weight.detach().clone()
    with mxprobe.emulate(policy, "paper"), caplog.at_level(logging.WARNING, logger="mxprobe.aqn"):
        handler.on_train_begin(None, state, control)
        logs: list[dict[str, float]] = []
        for step in range(10):
            state.global_step = step
            handler.on_step_begin(None, state, control)
            policy.generate()
            logs.append({"loss": 0.0})
            handler.on_log(None, state, control, logs[-1])
        handler.on_train_end(None, state, control)
        policy.generate()
    assert "AQN is on while the scale error is not corrected (paper)" in caplog.text
    schedule = NoiseSchedule()
    assert [log["aqn_sigma"] for log in logs] == [schedule.sigma(step / 10) for step in range(10)]
    assert torch.equal(policy.seen[0], weight)
    assert not torch.equal(policy.seen[1], weight)
    assert torch.equal(policy.seen[-1], weight)
