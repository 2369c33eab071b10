"""Which weights an engine holds: decoded by its layout, set against the trainer's versions, named where wrong."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mxprobe.agent.parts import sync
from mxprobe.agent.parts.sync import WeightSync
from mxprobe.attribution.held_versions import HeldVersion, held_versions
from mxprobe.audit import audit
from mxprobe.measuring.engines.fingerprints import (
    engine_rows,
    features_of,
    not_comparable_row,
    row_hashes,
    trainer_rows,
)
from mxprobe.measuring.engines.layouts import HeldWeight, NotComparable, decode_mxfp4, weights_of
from mxprobe.measuring.operands.weights import watched_features
from mxprobe.measuring.recipes import quantize
from mxprobe.tables import TABLES
from mxprobe.trace import TraceWriter, open_trace
from tests import part_context
from tests.standin_engine import (
    Backend,
    EngineModel,
    GptOssMxfp4MoEMethod,
    LinearBase,
    Mxfp4MoEMethod,
    RoutedExperts,
    pack_mxfp4,
    tiled_scales,
)
from tests.standin_modules import pretend

SIZE, LAYERS = 64, 2
PARTS = {"q_proj": SIZE, "k_proj": SIZE // 2, "v_proj": SIZE // 2, "o_proj": SIZE}


def weights(step: int) -> dict[str, torch.Tensor]:
    """The trainer's weights of a step, by name."""
    generator = torch.Generator().manual_seed(step)
    return {
        f"layers.{layer}.{part}.weight": torch.randn(n_out, SIZE, generator=generator)
        for layer in range(LAYERS)
        for part, n_out in PARTS.items()
    }


def held_rows(model: nn.Module, step: int = 1) -> Iterator[dict[str, Any]]:
    for each in weights_of(model):
        if isinstance(each, NotComparable):
            yield not_comparable_row(*each, step=step)
            continue
        n_out, n_in = each.shape
        columns = None if each.columns is None else each.columns(features_of(n_in, n_out))
        yield from engine_rows(each, each.rows(features_of(n_out, n_in)), columns, step=step)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with TraceWriter(path, {}) as writer:
        writer.append("weight_codes", {name: [row[name] for row in rows] for name, _ in TABLES["weight_codes"]})
    return path


def versions(*steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in steps:
        for name, w in weights(step).items():
            index = watched_features(w)
            rows += trainer_rows(name.removesuffix(".weight"), w[index], index, len(w), step=step)
    return rows


def judged(model: nn.Module, tmp_path: Path) -> dict[str, HeldVersion]:
    """Of an engine, against a trainer at step 10 whose versions 7 to 10 were kept."""
    trainer = open_trace(write(tmp_path / "trainer", versions(7, 8, 9, 10)))
    engine = open_trace(write(tmp_path / "engine", list(held_rows(model))))
    return {each.module: each for each in held_versions(trainer, engine)}


def engine(step: int = 10, *, packed: bool = False) -> EngineModel:
    model = EngineModel(LAYERS, SIZE, packed=packed)
    model.load_weights(weights(step).items())
    return model


def test_packed_codes_decode_to_the_quantized_values():
    w = torch.randn(8, 96)
    codes, scale = pack_mxfp4(w)
    assert torch.equal(decode_mxfp4(codes, scale), quantize(w, "mxfp4+rceil").float())


def test_rows_are_hashed_where_there_is_no_numpy(monkeypatch: pytest.MonkeyPatch):
    def absent(self: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", absent)
    values = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]])
    first, signed, other = row_hashes(values)
    assert first == signed != other
    assert row_hashes(values.T.contiguous().T) == [first, signed, other]
    assert row_hashes(values[:0]) == []
    digest = hashlib.blake2b(struct.pack("<HH", 0, 0x3F80), digest_size=8).digest()
    assert first == int.from_bytes(digest, "big", signed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_fused_weights_are_found_under_the_trainers_names(packed: bool):
    found = {each.module: each for each in weights_of(engine(packed=packed)) if isinstance(each, HeldWeight)}
    assert set(found) == {name.removesuffix(".weight") for name in weights(10)}
    for name, each in found.items():
        w = weights(10)[f"{name}.weight"]
        wanted = quantize(w, "mxfp4+rceil").float() if packed else w
        assert each.shape == tuple(w.shape)
        assert torch.equal(each.rows(torch.arange(len(w))), wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_an_engine_in_step_is_current_and_no_finding(packed: bool, tmp_path: Path):
    found = judged(engine(packed=packed), tmp_path)
    assert len(found) == LAYERS * len(PARTS)
    assert {(each.state, each.lag) for each in found.values()} == {("current", 0)}
    if packed:
        assert found["layers.0.q_proj"].detail == "holds the trainer's weights of step 10, rounded as mxfp4 rceil"
    assert not audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings


@torch.no_grad()
def stale(model: EngineModel, packed: bool) -> None:
    model.load_weights([("layers.1.k_proj.weight", weights(7)["layers.1.k_proj.weight"])])


@torch.no_grad()
def transposed(model: EngineModel, packed: bool) -> None:
    w = weights(10)["layers.0.o_proj.weight"]
    model.load_weights([("layers.0.o_proj.weight", w.T.contiguous())])


@torch.no_grad()
def flipped(model: EngineModel, packed: bool) -> None:
    layer: Any = model.layers[1]
    if packed:
        layer.o_proj.weight_packed[3, 5] ^= 1 << 2  # one bit of one code
    else:
        layer.o_proj.weight[3, 5] *= 2


BEHIND = "holds the trainer's weights of step 7"
TURNED = "holds the transpose of the trainer's weights"
BIT = "1 of 64 rows differ from the trainer's weights of step 10"
PLANTS: list[tuple[Callable[[EngineModel, bool], None], bool, str, str, str, str]] = [
    (stale, False, "layers.1.k_proj", "behind", "partial_refit", BEHIND),
    (stale, True, "layers.1.k_proj", "behind", "partial_refit", BEHIND),
    (transposed, False, "layers.0.o_proj", "transposed", "reordered_weights", TURNED),  # packed: other blocks, unknown
    (flipped, False, "layers.1.o_proj", "flipped", "flipped_weights", BIT),
    (flipped, True, "layers.1.o_proj", "flipped", "flipped_weights", BIT),
]


@pytest.mark.parametrize("plant", PLANTS, ids=[f"{p[0].__name__}-{'packed' if p[1] else 'plain'}" for p in PLANTS])
def test_a_planted_fault_is_named_with_its_layer(plant: Any, tmp_path: Path):
    spoil, packed, module, state, slug, words = plant
    model = engine(packed=packed)
    spoil(model, packed)
    found = judged(model, tmp_path)
    assert {name for name, each in found.items() if each.state != "current"} == {module}
    assert found[module].state == state
    assert found[module].detail.startswith(words)
    (finding,) = audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings
    assert (finding.pitfall.slug, finding.modules) == (slug, (module,))


def test_an_engine_three_steps_behind_is_stale_as_a_whole(tmp_path: Path):
    found = judged(engine(7), tmp_path)
    assert {(each.state, each.lag) for each in found.values()} == {("behind", 3)}
    (finding,) = audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings
    assert finding.pitfall.slug == "stale_weights"


def test_a_version_between_those_kept_is_not_called_torn(tmp_path: Path):
    """A small step: few rows change their codes, in every module."""
    model, noise = EngineModel(LAYERS, SIZE, packed=True), torch.Generator().manual_seed(0)
    model.load_weights((name, w + 2e-4 * torch.randn(w.shape, generator=noise)) for name, w in weights(10).items())
    found = judged(model, tmp_path)
    assert "between" in {each.state for each in found.values()}
    assert {each.state for each in found.values()} <= {"between", "current"}
    assert not audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings


def test_weights_of_another_model_are_unknown(tmp_path: Path):
    assert {each.state for each in judged(engine(99), tmp_path).values()} == {"unknown"}


def test_a_layout_that_is_not_known_is_not_compared(tmp_path: Path):
    model = engine()
    layer: Any = model.layers[0]
    layer.qkv_proj.tp_size = 2
    layer.o_proj.weight = nn.Parameter(layer.o_proj.weight.to(torch.int32), False)  # as Marlin holds it
    model.layers[1].o_proj = LinearBase(SIZE, [SIZE], packed=True)
    swizzled: Any = model.layers[1].o_proj
    swizzled.weight_scale = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), False)
    found = judged(model, tmp_path)
    why = {name: each.detail for name, each in found.items() if each.state == "not comparable"}
    assert set(why) == {"layers.0.qkv_proj", "layers.0.o_proj", "layers.1.o_proj"}
    assert "a shard of 2" in why["layers.0.qkv_proj"]
    assert "int32" in why["layers.0.o_proj"]
    assert "swizzled perhaps" in why["layers.1.o_proj"]
    assert not audit(open_trace(tmp_path / "trainer"), open_trace(tmp_path / "engine")).findings


def test_experts_stacked_as_w13_and_w2_are_taken_apart():
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.w13_weight = nn.Parameter(torch.randn(2, 32, 16))
    model.experts.w2_weight = nn.Parameter(torch.randn(2, 16, 16))
    found = {each.module: each for each in weights_of(model) if isinstance(each, HeldWeight)}
    assert set(found) == {f"experts.{e}.{p}" for e in range(2) for p in ("gate_proj", "up_proj", "down_proj")}
    up = found["experts.1.up_proj"]
    assert torch.equal(up.rows(torch.arange(16)), model.experts.w13_weight[1, 16:])


EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def packed_experts(method: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Two experts under `method`, processed for its kernel, and the values of each weight by the trainer's name."""
    generator = torch.Generator().manual_seed(3)
    experts = [tuple(torch.randn(128, 128, generator=generator) for _ in EXPERT_PARTS) for _ in range(2)]
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.routed_experts = RoutedExperts(experts, method)  # type: ignore[arg-type]
    method.process_weights_after_loading(model.experts.routed_experts)
    rounded = {
        f"experts.{e}.{part}": quantize(w, "mxfp4+rceil").float()
        for e, expert in enumerate(experts)
        for part, w in zip(EXPERT_PARTS, expert, strict=True)
    }
    return model, rounded


DECODED = [each for each in Backend if each is not Backend.MARLIN]


@pytest.mark.parametrize("backend", DECODED, ids=[each.name for each in DECODED])
@pytest.mark.parametrize("method", [Mxfp4MoEMethod, GptOssMxfp4MoEMethod])
def test_codes_that_were_shuffled_for_a_kernel_are_found_where_they_are(method: Any, backend: Backend):
    model, wanted = packed_experts(method(backend))
    found = {each.module: each for each in weights_of(model)}
    if method is GptOssMxfp4MoEMethod and backend is Backend.CUTLASS_MXFP4_MXFP4:  # no kernel of gpt-oss
        assert all(isinstance(each, NotComparable) for each in found.values())
        return
    assert set(found) == set(wanted)
    for name, each in found.items():
        assert isinstance(each, HeldWeight)
        index = torch.tensor([0, 1, 5, 40, 127])
        assert each.columns is None
        assert torch.equal(each.rows(index), wanted[name][index]), each.layout


def test_codes_of_a_kernel_that_is_not_in_the_table_are_not_compared():
    model, _ = packed_experts(Mxfp4MoEMethod(Backend.MARLIN))
    assert {each.why for each in weights_of(model) if isinstance(each, NotComparable)} == {
        "unknown layout: Mxfp4MoEMethod has arranged it for MARLIN"
    }
    assert not any(isinstance(each, HeldWeight) for each in weights_of(model))


@pretend("vllm.model_executor.kernels.linear.mxfp4.flashinfer")
class FlashInferMxFp4LinearKernel:
    """vllm 0.33.0: `weight_packed` becomes `weight`, and its scales are tiled."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight_packed.data, False)
        del layer.weight_packed
        layer.weight_scale = nn.Parameter(tiled_scales(layer.weight_scale.data), False)


class Scheme:
    kernel = FlashInferMxFp4LinearKernel()


def test_a_linear_whose_scales_were_tiled_for_a_kernel_is_decoded_as_before():
    model = engine(packed=True)
    before = {each.module: each for each in weights_of(model) if isinstance(each, HeldWeight)}
    index = torch.arange(0, 32, 3)
    wanted = {name: each.rows(index) for name, each in before.items()}
    for layer in model.layers:
        for linear in layer.children():
            linear.scheme = Scheme()  # type: ignore[assignment]
            Scheme.kernel.process_weights_after_loading(linear)
    found = {each.module: each for each in weights_of(model) if isinstance(each, HeldWeight)}
    assert found["layers.0.q_proj"].layout == "mxfp4 packed for CUTLASS"
    assert all(torch.equal(found[name].rows(index), wanted[name]) for name in wanted)


def test_packing_after_a_load_is_listened_to_at_its_class():
    told = part_context.told()
    weight_sync = WeightSync(told.context)
    model, _ = packed_experts(Mxfp4MoEMethod(Backend.EMULATION))
    before = KnownMethod.process_weights_after_loading
    model.experts.routed_experts.quant_method = KnownMethod(Backend.EMULATION)
    weight_sync.watch([model])
    try:
        weight_sync.take([model])
        assert not weight_sync.is_due
        layer: Any = model.experts.routed_experts
        layer.quant_method.process_weights_after_loading(layer)
        assert weight_sync.is_due
        weight_sync.take([model])
    finally:
        weight_sync.remove()
    assert KnownMethod.process_weights_after_loading is before
    assert told.details[-1] == "1 calls of process_weights_after_loading: 0 weights read, 2 not comparable"


class KnownMethod(Mxfp4MoEMethod):
    """A class that its module knows by its name, as an engine's is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)


def test_weights_that_do_not_fit_into_one_pass_take_turns(monkeypatch: pytest.MonkeyPatch):
    told = part_context.told()
    weight_sync = WeightSync(told.context)
    model = engine()

    def passed() -> list[str]:
        held = weight_sync.take([model])
        return [] if held is None else list(dict.fromkeys(row["module"] for _, row in held.rows(1)))

    everything = passed()
    assert len(everything) == LAYERS * len(PARTS)
    assert not weight_sync.is_due
    monkeypatch.setattr(sync, "PASS_BYTES", 2 * 4 * SIZE * SIZE)
    weight_sync.watch([model])
    try:
        seen = passed()
        assert seen == everything[: len(seen)] != everything
        while weight_sync.is_due:
            seen += passed()
        assert seen == everything
        first = passed()
        model.load_weights(weights(10).items())
        assert passed() == first  # new weights: from the beginning
        read = f"{len(first)} weights read, 0 not comparable; the others in the passes that follow"
        assert told.details == [f"1 calls of load_weights: {read}"]
    finally:
        weight_sync.remove()
