from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mxprobe.agent import roots
from mxprobe.agent.clock import completed_steps
from mxprobe.agent.module_rows import module_rows
from mxprobe.agent.roots import RootWatch, trained_roots
from mxprobe.measuring.adapters.fused_experts import ExpertsAdapter
from mxprobe.measuring.adapters.module_names import named_modules, plain_name
from mxprobe.measuring.adapters.weight_modules import misfits, take_inventory
from mxprobe.tables import TABLES


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 16, 8))
        self.down = nn.Parameter(torch.zeros(4, 8, 8))


class PackedExperts(nn.Module):
    """Codes of quantized weights: no operand that could be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Parameter(torch.zeros(4, 16, 4, dtype=torch.uint8), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.Linear(8, 8, bias=False)
        self.again = self.attention
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.experts = Experts()
        self.packed = PackedExperts()
        self.norm = nn.LayerNorm(8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def rows_of(model: nn.Module, *globs: str) -> dict[str, dict[str, object]]:
    return {row["module"]: row for row in module_rows(take_inventory([model], globs or ("*",)), {})}


def test_every_owner_of_a_matrix_is_listed_once():
    rows = rows_of(Model())
    assert set(rows) == {
        "embed",
        "attention",
        "normed",
        "experts.gate_up",
        "experts.down",
        "packed",
        "encoder.self_attn",
        "encoder.self_attn.out_proj",
        "encoder.linear1",
        "encoder.linear2",
    }
    assert all(set(row) == {name for name, _ in TABLES["modules"]} for row in rows.values())


def test_what_is_not_probed_says_why():
    rows = rows_of(Model(), "attention")
    assert rows["normed"]["status"] == "not_selected"
    assert (rows["embed"]["status"], rows["embed"]["gemm_flops"]) == ("not_linear", 0.0)
    assert rows["experts.down"]["status"] == "not_selected"
    assert rows["experts.down"]["n_parameters"] == 8 * 8  # one expert's, as each token meets
    assert rows["packed"]["status"] == "not_linear"
    assert rows["packed"]["reason"].startswith("4 matrices held as one parameter of 3 dimensions")  # type: ignore[union-attr]


def test_a_parametrized_linear_keeps_its_class_and_shape():
    row = rows_of(Model())["normed"]
    assert (row["class_name"], row["shape"], row["n_parameters"]) == ("Linear", [8, 8], 64)


def test_a_hook_that_would_change_the_path_is_not_placed():
    entries = {entry.name: entry for entry in take_inventory([Model()], ["*"])}
    assert not entries["encoder.linear1"].selected
    row = rows_of(Model())["encoder.linear1"]
    assert row["status"] == "not_called"
    assert "fused inference path" in str(row["reason"])


def test_names_lose_what_wrappers_put_in_front():
    assert plain_name("module._orig_mod.layers.0.q_proj") == "layers.0.q_proj"
    assert plain_name("layers.0._orig_mod.q_proj") == "layers.0.q_proj"
    assert plain_name("submodule.q_proj") == "submodule.q_proj"
    assert plain_name("module") == ""


def test_several_roots_are_told_apart_by_class():
    roots: list[nn.Module] = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)), nn.Linear(3, 3)]
    assert [name for name, m in named_modules(roots) if isinstance(m, nn.Linear)] == [
        "Sequential.0",
        "Sequential_2.0",
        "Linear",
    ]


def test_inner_modules_seen_as_roots_do_not_hold_everything():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert trained_roots([model[1]], optimizer) == ([model[1]], False)
    assert trained_roots([model[1], model], optimizer) == ([model], True)
    assert trained_roots([nn.Linear(2, 2)], optimizer)[0] == []


def test_the_run_s_own_step_count_is_read_where_there_is_one():
    model = nn.Linear(2, 2)
    for optimizer, expected in (
        (torch.optim.AdamW(model.parameters()), 3.0),
        (torch.optim.SGD(model.parameters()), None),
    ):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        count = completed_steps(optimizer)
        assert (None if count is None else count.item()) == expected


def test_a_stage_that_cannot_be_noted_stops_no_forward(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise TypeError("no stage of a kind that is known")

    monkeypatch.setattr(roots, "note_stage", broken)
    told: list[str] = []
    watch = RootWatch(lambda where, error: told.append(f"{where}: {error}"))
    try:
        model = nn.Linear(8, 8)
        model(torch.zeros(1, 8))
    finally:
        watch.close()
    assert list(watch.with_grad.values()) == [model]
    assert told == ["looking for a pipeline stage: no stage of a kind that is known"]


def test_a_module_that_an_adapter_stumbles_over_is_told_and_the_others_are_probed(monkeypatch: pytest.MonkeyPatch):
    def stumbling(self: Any, module: nn.Module) -> tuple[str, ...]:
        raise AttributeError("no such parameter")

    monkeypatch.setattr(ExpertsAdapter, "parts", stumbling)
    entries = take_inventory([Model()], ["*"])
    rows = {row["module"]: row for row in module_rows(entries, {})}
    assert rows["experts"]["status"] == "not_called"
    assert rows["experts"]["reason"].startswith("adapter does not fit Experts: AttributeError")
    assert misfits(entries) == ["adapter does not fit Experts: AttributeError"]
    assert next(entry for entry in entries if entry.name == "attention").selected
