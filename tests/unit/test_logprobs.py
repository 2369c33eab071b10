"""Tokens of both sides: what is taken of a generation, how its sequences are found again, and the sums."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.measuring.tokens.generation import (
    Generation,
    Sampling,
    is_measured,
    measured_positions,
    sampling_in_progress,
)
from mxprobe.measuring.tokens.lm_head import Head, find_head
from mxprobe.measuring.tokens.logprobs import compute_dtype, pair_up, score_hidden, score_logits
from mxprobe.measuring.tokens.matching import left_aligned, match
from mxprobe.measuring.tokens.mismatch import Pairs, rollout_rows, signal_values
from mxprobe.tables import TABLES
from mxprobe_kernels import token_statistics
from tests.small_lm import SmallLM

PAD, EOS, VOCABULARY = 0, 1, 11
CPU = torch.device("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def generated(tokens: list[list[int]], prompts: list[list[int]], temperature: float = 1.0) -> Generation:
    """A generation of these tokens; its logits are `rand(S, n, V)` row by row, the batch's order kept."""
    made = Generation(torch.tensor(prompts), Sampling(temperature, (EOS,), PAD), seed=0)
    logits = rand(len(tokens), len(tokens[0]), VOCABULARY)
    for k in range(len(tokens[0])):
        made.take_logits(logits[:, k : k + 1])
        made.take_tokens(torch.tensor(tokens)[:, k : k + 1])
    return made


PROMPTS = [[PAD, 5, 6], [7, 8, 9], [PAD, PAD, 5]]
TOKENS = [[2, 3, EOS, PAD], [4, 4, 4, 4], [5, EOS, PAD, PAD]]


def test_statistics_are_those_of_the_tempered_softmax():
    logits, tokens = rand(6, VOCABULARY), torch.arange(6)
    p = (logits.double() / 0.7).softmax(-1)
    found = token_statistics(logits, tokens, 0.7)
    assert torch.allclose(found.log_prob.double(), p.log()[torch.arange(6), tokens], atol=1e-6)
    assert torch.allclose(found.entropy.double(), -(p * p.log()).sum(-1), atol=1e-6)


def test_a_token_that_is_ruled_out_adds_no_entropy():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    assert token_statistics(logits, torch.tensor([0]), 1.0).entropy.item() == pytest.approx(0.693147, rel=1e-5)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100, 5000])
def test_positions_thin_out_by_octaves(n: int):
    positions = measured_positions(n, CPU).tolist()
    assert positions == [k for k in range(n) if is_measured(k)]
    assert len(positions) <= 32 + 16 * max(n.bit_length() - 5, 0)
    assert positions[:32] == list(range(min(n, 32)))


def test_a_completion_ends_with_its_first_end_of_sequence():
    made = generated(TOKENS, PROMPTS)
    assert made.lengths().tolist() == [[3, 4, 2][i] for i in made.index.tolist()]
    assert made.is_whole


def test_logits_that_were_not_seen_make_a_generation_useless():
    made = generated(TOKENS, PROMPTS)
    made.take_tokens(torch.tensor([[3], [3], [3]]))
    assert not made.is_whole


def test_leading_padding_is_taken_off():
    ids, lead = left_aligned(torch.tensor(PROMPTS), PAD)
    assert ids.tolist() == [[5, 6, -1], [7, 8, 9], [5, -1, -1]]
    assert lead.tolist() == [1, 0, 2]
    assert left_aligned(ids, None)[0] is ids


@pytest.mark.parametrize("front", [0, 2])
def test_sequences_are_found_in_any_order_and_under_any_padding(front: int):
    made = generated(TOKENS, PROMPTS)
    whole = torch.cat((torch.tensor(PROMPTS), torch.tensor(TOKENS)), 1)
    order = [2, 0, 1]
    batch = torch.cat((torch.full((3, front), PAD), whole[order], torch.full((3, 1), PAD)), 1)
    found = match(made, batch)
    assert found.found.all()
    original = made.index.tolist()
    assert [order[row] for row in found.row.tolist()] == original
    assert found.start.tolist() == [front + 3] * 3


def test_another_prompt_another_token_or_a_cut_batch_is_no_match():
    made = generated(TOKENS, PROMPTS)
    whole = torch.cat((torch.tensor(PROMPTS), torch.tensor(TOKENS)), 1)
    other = whole.clone()
    other[0, 1], other[1, 5] = 9, 2  # a prompt token of the first, a generated one of the second
    position = {original: at for at, original in enumerate(made.index.tolist())}
    assert [bool(match(made, other).found[position[i]]) for i in range(3)] == [False, False, True]
    cut = match(made, whole[:, :5])
    assert [bool(cut.found[position[i]]) for i in range(3)] == [False, False, True]
    after_the_end = whole.clone()
    after_the_end[0, 6] = 7  # behind the end of sequence, where the trainer may put anything
    assert match(made, after_the_end).found.all()


@pytest.mark.parametrize("way", ["hidden", "logits", "last logits"])
def test_both_sides_of_each_token(way: str):
    made = generated(TOKENS, PROMPTS, temperature=0.5)
    ids = torch.cat((torch.tensor(PROMPTS), torch.tensor(TOKENS)), 1)[[1, 2, 0]]
    hidden, weight, bias = rand(3, 7, 8, seed=1), rand(VOCABULARY, 8, seed=2), rand(VOCABULARY, seed=3)
    logits = hidden @ weight.T + bias
    if way == "hidden":
        scored = score_hidden(made, ids, hidden, weight, bias)
    else:
        scored = score_logits(made, ids, logits if way == "logits" else logits[:, 2:])
    pairs = pair_up(made, [scored])
    expected_train: list[float] = []
    expected_rollout: list[float] = []
    for i in made.index.tolist():
        row = [1, 2, 0].index(i)
        for k in range([3, 4, 2][i]):
            token = TOKENS[i][k]
            expected_train.append(float((logits[row, 2 + k] / 0.5).log_softmax(-1)[token]))
            expected_rollout.append(float((rand(3, 4, VOCABULARY)[i, k] / 0.5).log_softmax(-1)[token]))
    assert pairs.log_prob_train.tolist() == pytest.approx(expected_train, abs=1e-5)
    assert pairs.log_prob_rollout.tolist() == pytest.approx(expected_rollout, abs=1e-5)
    assert (pairs.n_sequences, pairs.n_unmatched) == (3, 0)


def test_sequences_come_from_several_micro_batches_and_count_once():
    made = generated(TOKENS, PROMPTS)
    ids = torch.cat((torch.tensor(PROMPTS), torch.tensor(TOKENS)), 1)
    logits = rand(3, 7, VOCABULARY, seed=4)
    whole = pair_up(made, [score_logits(made, ids, logits)])
    parts = [score_logits(made, ids[i : i + 1], logits[i : i + 1]) for i in (2, 0)]
    some = pair_up(made, [*parts, *parts])
    assert (some.n_sequences, some.n_unmatched) == (2, 1)
    assert len(some.log_prob_train) == 5
    assert set(some.log_prob_train.tolist()) < set(whole.log_prob_train.tolist())


def pairs_of(d: torch.Tensor) -> Pairs:
    zero = torch.zeros(len(d), dtype=torch.float64)
    return Pairs(d - 1.0, zero - 1.0, 2, 1, torch.arange(len(d)).double(), zero)


def test_the_sums_of_a_row():
    d = torch.tensor([0.5, -0.1, 0.0, 0.3], dtype=torch.float64)
    (row,) = list(rollout_rows(pairs_of(d)))
    columns = {name for name, _ in TABLES["rollouts"]} - {"step", "time_ns", "source", "temperature", "dtype"}
    assert set(row) == columns
    w = (-d).exp()
    assert row["sum_d"] == pytest.approx(0.7)
    assert row["sum_abs_d"] == pytest.approx(0.9)
    assert row["max_abs_d"] == 0.5
    assert row["sum_k3"] == pytest.approx(float((w - 1 + d).sum()))
    assert row["sum_w2"] == pytest.approx(float((w**2).sum()))
    p = (d - 1.0).exp()
    assert row["sum_dp"] == pytest.approx(float((p - math.exp(-1.0)).sum()))
    assert row["sum_abs_dp"] == pytest.approx(float((p - math.exp(-1.0)).abs().sum()))
    assert row["n_false_clip"] is None
    assert row["n_outside_clip"] == 2  # exp(-.5) = .61 and exp(-.3) = .74; exp(.1) is within
    values = {key: value for key, _, _, value in signal_values(row)}
    assert values["mxprobe/mismatch_abs_dlogp"] == pytest.approx(0.225)
    assert values["mxprobe/mismatch_ess"] == pytest.approx(float(w.sum() ** 2 / (4 * (w**2).sum())))


def test_quarters_by_entropy_add_up():
    rows = list(rollout_rows(pairs_of(rand(40).double())))
    whole, quarters = rows[0], rows[1:]
    assert [row["stratum"] for row in quarters] == [f"entropy_q{i}" for i in (1, 2, 3, 4)]
    for name in ("n_tokens", "sum_d", "sum_k3", "sum_w2", "sum_entropy_rollout"):
        assert sum(row[name] for row in quarters) == pytest.approx(whole[name])
    assert quarters[0]["sum_entropy_rollout"] < quarters[-1]["sum_entropy_rollout"]


def test_strata_by_advantage_position_and_lag_add_up():
    n = 90
    pairs = pairs_of(rand(n).double())._replace(
        advantage=torch.tensor([1.0, -1.0, 0.0]).repeat(30).double(),
        position=torch.arange(n),
        length=torch.full((n,), n),
        lag=torch.arange(n) % 9,
    )
    rows = {row["stratum"]: row for row in rollout_rows(pairs)}
    kinds = {"advantage": ["positive", "negative", "zero"], "position": [0, 16, 64], "lag": [0, 1, 2, 3, 4]}
    for kind, bins in kinds.items():
        assert [name for name in rows if name.startswith(kind)] == [f"{kind}_{each}" for each in bins]
        for name in ("n_tokens", "sum_abs_d", "sum_k3", "n_outside_clip", "n_false_clip"):
            assert sum(rows[f"{kind}_{each}"][name] for each in bins) == pytest.approx(rows["all"][name])
    assert [rows[f"position_{each}"]["n_tokens"] for each in (0, 16, 64)] == [16, 48, 26]
    assert rows["lag_4"]["n_tokens"] == 50
    assert rows["advantage_zero"]["n_false_clip"] == 0 < rows["advantage_positive"]["n_false_clip"]


def test_the_coarsest_dtype_is_named():
    made = generated(TOKENS, PROMPTS)
    ids = torch.cat((torch.tensor(PROMPTS), torch.tensor(TOKENS)), 1)
    scored = score_logits(made, ids, rand(3, 7, VOCABULARY))
    assert compute_dtype(made, [scored]) == "float32"
    assert compute_dtype(made, [scored._replace(dtype=torch.bfloat16)]) == "bfloat16"


def _sample(generation_config: Any) -> Any:  # named and signed as the function of transformers whose frame is read
    return sampling_in_progress()


def test_the_temperature_is_that_of_the_running_generate():
    config = SimpleNamespace(do_sample=True, temperature=0.6, eos_token_id=[1, 2], pad_token_id=None, num_beams=1)
    assert _sample(config) == Sampling(0.6, (1, 2), 1)
    config.do_sample = False
    assert _sample(config) == Sampling(1.0, (1, 2), 1)
    config.num_beams = 4
    assert "beam search" in _sample(config)
    assert "not by transformers" in str(sampling_in_progress())


def test_the_head_is_found_by_its_shape():
    model = SmallLM()
    head = find_head([model])
    assert head == Head(model.embed, model.norm, model.head, model)


def test_a_model_without_one_is_told_why():
    assert "no Linear has the shape" in str(find_head([nn.Sequential(nn.Linear(4, 4))]))
    bare = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    assert "no norm of the hidden size" in str(find_head([bare]))
