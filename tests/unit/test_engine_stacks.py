"""A trainer's fused experts against an engine's, expert by expert: however either of them stores them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mxprobe.attribution.held_versions import HeldVersion, held_versions
from mxprobe.audit import audit
from mxprobe.engines import held_weights, record_weights
from mxprobe.measuring.engines import hashed_stacks
from mxprobe.measuring.engines.expert_parts import parts_of
from mxprobe.measuring.engines.hashed_stacks import copy_stacks
from mxprobe.trace import open_trace
from tests.standin_engine import (
    Backend,
    GptOssMxfp4MoEMethod,
    Mxfp4MoEMethod,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from tests.unit.test_engines import write

HIDDEN, N_EXPERTS, LAYERS, NOW, LATE = 64, 4, 2, 10, 7
PARTS = ("gate_proj", "up_proj", "down_proj")
Matrices = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def matrices(step: int, layer: int, ffn: int = HIDDEN) -> Matrices:
    """(gate, up [F, H], down [H, F]) of each expert, bfloat16, that differ a little from step to step."""
    base, change = (torch.Generator().manual_seed(seed) for seed in (layer, 100 * layer + step))

    def weight(n_out: int, n_in: int) -> torch.Tensor:
        w = torch.randn(n_out, n_in, generator=base) + 0.05 * torch.randn(n_out, n_in, generator=change)
        return w.to(torch.bfloat16)

    shapes = ((ffn, HIDDEN), (ffn, HIDDEN), (HIDDEN, ffn))
    return [tuple(weight(*shape) for shape in shapes) for _ in range(N_EXPERTS)]  # type: ignore[misc]


class Storage(NamedTuple):
    """How a trainer's module stores its experts, and what it says about that."""

    both: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """gate, up [F, H] -> gate_up [2 F, H]; None for parameters of their own."""
    turned: bool
    told: dict[str, bool]


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([gate, up], 1).flatten(0, 1)


def stacked(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([gate, up])


QWEN = Storage(stacked, False, {"is_concatenated": True, "is_transposed": False})
STORAGES = {
    "transformers' Qwen3MoeExperts": QWEN,
    "transformers' GptOssExperts": Storage(interleaved, True, {"is_concatenated": False, "is_transposed": True}),
    "gate over up, told by nobody": Storage(stacked, True, {}),
    "gate and up row by row, told by nobody": Storage(interleaved, False, {}),
    "torchtitan's GroupedExperts": Storage(None, False, {}),
    "the same, turned": Storage(None, True, {}),
}


class Fused(nn.Module):
    def __init__(self, experts: Matrices, storage: Storage) -> None:
        super().__init__()
        for name, told in storage.told.items():
            setattr(self, name, told)
        gates, ups, downs = ([each[i] for each in experts] for i in range(3))
        if storage.both is None:
            held = {"w1": gates, "w3": ups, "w2": downs}
        else:
            pairs = zip(gates, ups, strict=True)
            held = {"gate_up_proj": [storage.both(*pair) for pair in pairs], "down_proj": downs}
        for name, each in held.items():
            whole = torch.stack(each)
            setattr(self, name, nn.Parameter(whole.mT.contiguous() if storage.turned else whole, False))


def trained(storage: Storage, steps: tuple[int, ...], ffn: int = HIDDEN, first: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in steps:
        for layer in range(LAYERS):
            module = Fused(matrices(step, layer, ffn), storage)
            for stack in copy_stacks(step, f"layers.{layer}.mlp.experts", module, first):
                rows += stack.table_rows()
    return rows


def engine(method: Any, held: list[Matrices]) -> nn.Module:
    """A model as vLLM names it, processed for the method's kernel."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for experts in held:
        layer = nn.Module()
        layer.mlp, layer.mlp.experts = nn.Module(), nn.Module()  # type: ignore[union-attr]
        layer.mlp.experts.routed_experts = RoutedExperts(experts, method)  # type: ignore[union-attr]
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer.mlp.experts.routed_experts)  # type: ignore[union-attr]
        model.layers.append(layer)
    return model


def routed(model: Any, layer: int) -> RoutedExperts:
    return model.layers[layer].mlp.experts.routed_experts  # type: ignore[no-any-return]


def judged(rows: list[dict[str, Any]], tmp_path: Path, *models: nn.Module) -> dict[str, HeldVersion]:
    write(tmp_path / "trainer", rows)
    record_weights([held_weights(each) for each in models], tmp_path / "engine")
    found = held_versions(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine"))
    return {each.module: each for each in found}


def findings(tmp_path: Path) -> list[Any]:
    return list(audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings)


EVERY = {f"layers.{n}.mlp.experts.{e}.{p}" for n in range(LAYERS) for e in range(N_EXPERTS) for p in PARTS}
METHODS: dict[str, Callable[[], Any]] = {
    "plain": UnquantizedFusedMoEMethod,
    "packed": lambda: Mxfp4MoEMethod(Backend.EMULATION),
    "packed, shuffled": lambda: GptOssMxfp4MoEMethod(Backend.FLASHINFER_TRTLLM_MXFP4_BF16),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", STORAGES)
def test_fused_experts_are_recognised_one_by_one(storage: str, method: str, tmp_path: Path):
    ffn = 128  # of matrices that are not square the shapes tell more
    rows = trained(STORAGES[storage], (8, 9, NOW), ffn)
    found = judged(rows, tmp_path, engine(METHODS[method](), [matrices(NOW, layer, ffn) for layer in range(LAYERS)]))
    assert set(found) == EVERY
    assert {(each.state, each.lag) for each in found.values()} == {("current", 0)}, found
    assert not findings(tmp_path)


@pytest.mark.parametrize("storage", ["torchtitan's GroupedExperts", "the same, turned"])
def test_square_experts_are_read_the_way_that_agrees_and_it_is_said(storage: str, tmp_path: Path):
    held = [matrices(NOW, layer) for layer in range(LAYERS)]
    gate, up, down = held[0][2]
    held[0][2] = gate, up, down.T.contiguous()
    found = judged(trained(STORAGES[storage], (8, 9, NOW)), tmp_path, engine(UnquantizedFusedMoEMethod(), held))
    wrong = "layers.0.mlp.experts.2.down_proj"
    assert {name for name, each in found.items() if each.state != "current"} == {wrong}
    way = "as [in, out]" if "turned" in storage else "as [out, in]"
    n = LAYERS * N_EXPERTS * len(PARTS) - 1
    words = f"holds the transpose of the trainer's weights; read as stored {way}, with which {n} weights agree"
    assert found[wrong].detail == words


Spoil = Callable[[list[Matrices]], None]


def layer_behind(held: list[Matrices]) -> None:
    held[1] = matrices(LATE, 1)


def expert_transposed(held: list[Matrices]) -> None:
    gate, up, down = held[0][2]
    held[0][2] = gate, up, down.T.contiguous()


def experts_exchanged(held: list[Matrices]) -> None:
    held[1][0], held[1][3] = held[1][3], held[1][0]


BEHIND = {name for name in EVERY if name.startswith("layers.1.")}
TURNED = {"layers.0.mlp.experts.2.down_proj"}
EXCHANGED = {f"layers.1.mlp.experts.{expert}.{part}" for expert in (0, 3) for part in PARTS}
PLANTS: dict[str, tuple[Spoil, str, set[str], str, str]] = {
    "behind": (layer_behind, "plain", BEHIND, "partial_refit", "holds the trainer's weights of step 7, 3 behind"),
    "behind, packed": (
        layer_behind,
        "packed",
        BEHIND,
        "partial_refit",
        "holds the trainer's weights of step 7, rounded as mxfp4 rceil, 3 behind",
    ),
    "transposed": (
        expert_transposed,
        "plain",
        TURNED,
        "reordered_weights",
        "holds the transpose of the trainer's weights",
    ),
    "transposed, packed": (
        expert_transposed,
        "packed",
        TURNED,
        "unknown_weights",
        "holds none of the versions that the trainer's trace has",
    ),
    "exchanged": (
        experts_exchanged,
        "packed",
        EXCHANGED,
        "unknown_weights",
        "holds none of the versions that the trainer's trace has",
    ),
}


@pytest.mark.parametrize("storage", ["transformers' Qwen3MoeExperts", "transformers' GptOssExperts"])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_named_with_layer_and_expert(plant: str, storage: str, tmp_path: Path):
    spoil, method, wrong, slug, words = PLANTS[plant]
    held = [matrices(NOW, layer) for layer in range(LAYERS)]
    spoil(held)
    found = judged(trained(STORAGES[storage], (LATE, 8, 9, NOW)), tmp_path, engine(METHODS[method](), held))
    assert {name for name, each in found.items() if each.state != "current"} == wrong
    assert {found[name].detail for name in wrong} == {words}
    (finding,) = findings(tmp_path)
    assert finding.pitfall.slug == slug
    assert set(finding.modules) == wrong


def test_an_order_of_gate_and_up_that_is_known_is_held_against_the_engine_and_one_that_is_not_is_not(tmp_path: Path):
    """An engine that was loaded as if gate and up alternated."""
    held = [[(*interleaved(gate, up).chunk(2), down) for gate, up, down in matrices(NOW, la)] for la in range(LAYERS)]
    model = engine(UnquantizedFusedMoEMethod(), held)  # type: ignore[arg-type]
    rows = trained(QWEN, (9, NOW))
    told = judged(rows, tmp_path / "told", model)
    assert {name for name, each in told.items() if each.state == "unknown"} == {
        name for name in EVERY if not name.endswith("down_proj")
    }
    swapped = [[(up, gate, down) for gate, up, down in matrices(NOW, layer)] for layer in range(LAYERS)]
    rows = trained(Storage(stacked, False, {}), (9, NOW))
    untold = judged(rows, tmp_path / "untold", engine(UnquantizedFusedMoEMethod(), swapped))
    why = {each.detail for each in untold.values() if each.state == "not comparable"}
    assert {name for name, each in untold.items() if each.state == "current"} == {
        name for name in EVERY if name.endswith("down_proj")
    }
    assert why == {
        "cannot compare: the trainer's trace does not tell whether its experts are stored gate over up or "
        "gate and up row by row, and what the engine holds agrees with neither"
    }
    assert not findings(tmp_path / "untold")


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize("method", ["plain", "packed"])
def test_experts_of_several_ranks_are_called_by_their_numbers_in_the_whole_model(
    method: str, round_robin: bool, tmp_path: Path
):
    """The trainer's ranks hold others than the engine's: three experts and one."""
    rows: list[dict[str, Any]] = []
    for step in (LATE, 8, 9, NOW):
        for layer in range(LAYERS):
            every, name = matrices(step, layer), f"layers.{layer}.mlp.experts"
            for first, own in ((0, every[:3]), (2, every[2:])):
                for stack in copy_stacks(step, name, Fused(own, QWEN), first):
                    rows += stack.table_rows()
    held = [matrices(NOW, layer) for layer in range(LAYERS)]
    held[1][2] = matrices(LATE, 1)[2]
    models = [engine(METHODS[method](), held) for _ in range(2)]
    for rank, model in enumerate(models):
        for layer in range(LAYERS):
            routed(model, layer).spread(rank, 2, round_robin=round_robin)
    found = judged(rows, tmp_path, *models)
    assert set(found) == EVERY
    assert {(name, each.lag) for name, each in found.items() if each.state != "current"} == {
        (f"layers.1.mlp.experts.2.{part}", 3) for part in PARTS
    }


def test_experts_whose_numbers_are_not_known_are_not_compared(tmp_path: Path):
    model = engine(UnquantizedFusedMoEMethod(), [matrices(NOW, layer) for layer in range(LAYERS)])
    routed(model, 0).spread(1, 2, enable_eplb=True)
    sharded: Any = routed(model, 1)
    sharded.spread(1, 2)
    sharded.expert_map_manager = None
    sharded._expert_map = torch.empty(N_EXPERTS, device="meta")
    found = judged(trained(QWEN, (9, NOW)), tmp_path, model)
    assert {name: each.detail for name, each in found.items()} == {
        "layers.0.mlp.experts.routed_experts": (
            "cannot compare: experts of 2 ranks that are moved between them (EPLB)"
        ),
        "layers.1.mlp.experts.routed_experts": (
            "cannot compare: experts of one of 2 ranks, without a map of their numbers on the host"
        ),
    }


def test_experts_that_do_not_fit_are_not_hashed_and_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hashed_stacks, "HASHED_ELEMENTS", 2 * HIDDEN)
    held = [matrices(NOW, layer) for layer in range(LAYERS)]
    held[0] = matrices(LATE, 0)
    rows = trained(QWEN, (LATE, 8, 9, NOW))
    assert {len(row["features"]) for row in rows} == {2}
    found = judged(rows, tmp_path, engine(UnquantizedFusedMoEMethod(), held))
    by_state = {
        state: {name for name, each in found.items() if each.state == state}
        for state in {each.state for each in found.values()}
    }
    late, now = ({f"layers.{n}.mlp.experts.{e}.{p}" for e in (0, 2) for p in PARTS} for n in range(LAYERS))
    assert by_state == {"behind": late, "current": now, "not comparable": EVERY - late - now}


def test_an_engine_that_holds_a_version_that_was_not_kept_is_no_finding(tmp_path: Path):
    model = engine(UnquantizedFusedMoEMethod(), [matrices(8, layer) for layer in range(LAYERS)])
    found = judged(trained(QWEN, (5, 6, NOW)), tmp_path, model)
    assert {each.state for each in found.values()} == {"between"}
    assert not findings(tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_process_that_serves_the_trainers_own_classes_is_read_where_they_say_how_they_are_stored(
    storage: str, tmp_path: Path
):
    model = nn.Module()
    model.layers = nn.ModuleList()
    for layer in range(LAYERS):
        block = nn.Module()
        block.mlp = nn.Module()
        block.mlp.experts = Fused(matrices(LATE if layer else NOW, layer), STORAGES[storage])
        model.layers.append(block)
    found = judged(trained(STORAGES[storage], (LATE, 8, 9, NOW)), tmp_path, model)
    if not STORAGES[storage].told:
        assert {each.state for each in found.values()} == {"not comparable"}
        return
    assert {name: each.lag for name, each in found.items()} == {name: 3 * (name in BEHIND) for name in EVERY}


def test_parameters_that_are_no_gated_experts_have_no_parts():
    module = nn.Module()
    module.gate_up_proj, module.down_proj = (nn.Parameter(torch.zeros(2, *shape)) for shape in ((96, 64), (64, 64)))
    assert parts_of(module) == []
    assert copy_stacks(1, "experts", module, 0) == []


def test_rows_count_that_were_taken_when_the_versions_before_had_been_kept(tmp_path: Path):
    """Kept: 6 to 10 and 16 to 20. At step 12 nothing is known, at 17 the version of three steps before is not."""
    kept, taken = (*range(6, 11), *range(16, 21)), (9, 12, 17)
    rows = [row for step in kept for row in trained(QWEN, (step,)) if row["module"].endswith("down_proj")]
    for row in rows:
        row["time_ns"] = 10 * row["step"]
    write(tmp_path / "trainer", rows)
    read: list[dict[str, Any]] = []
    for step in taken:
        late = engine(UnquantizedFusedMoEMethod(), [matrices(step - 3, layer) for layer in range(LAYERS)])
        read += [{**row, "step": step, "time_ns": 10 * step + 5} for row in held_weights(late)]
    write(tmp_path / "engine", read)
    found = held_versions(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine"))
    judged = {each.module: each for each in found if each.state != "not comparable"}
    assert set(judged) == {name for name in EVERY if name.endswith("down_proj")}
    assert {each.detail for each in judged.values()} == {"holds the trainer's weights of step 6, 3 behind"}
