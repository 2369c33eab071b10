"""Fused experts as they are called: what is copied, and that the sums of a layer are those of each expert by hand."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import checkpoint

import mxprobe
from mxprobe.agent.clock import Clock
from mxprobe.agent.guard import Guard
from mxprobe.agent.probes.expert_versions import watched_features
from mxprobe.agent.probes.experts_probe import ExpertsProbe
from mxprobe.agent.probes.gemm_watch import GemmWatch
from mxprobe.agent.recorder import to_columns
from mxprobe.audit.searches import find_pitfalls
from mxprobe.events import EXPERTS, Event, finished
from mxprobe.measuring.adapters.expert_structure import expert_parameters
from mxprobe.measuring.moe import expert_snapshot as snapshot
from mxprobe.measuring.moe.expert_snapshot import ExpertsSnapshot
from mxprobe.measuring.step_rows import measure_step
from mxprobe.measuring.versions.weight_history import WeightHistory
from mxprobe.protocol import AgentConfig
from mxprobe_kernels import reference
from tests.moe_models import tiny, tokens

CONFIG = AgentConfig(whatifs=("of:0.5", "mbs:32"))


class Watched:
    """The probes of one module's parameters, and what was handed over."""

    def __init__(self, module: nn.Module, *, every: bool = False, name: str = "experts", weights: bool = True) -> None:
        self.errors: list[str] = []
        self.sent: list[ExpertsSnapshot] = []
        self.clock = Clock()
        self.probes = {
            part: ExpertsProbe(
                f"{name}.{part}",
                module,
                part=part,
                every_expert=every,
                clock=self.clock,
                guard=Guard(10, lambda where, detail: self.errors.append(f"{where}: {detail}"), lambda: None),
                submit=self.sent.append,  # pyright: ignore[reportArgumentType]
                max_rows=512,
                max_features=512,
                trains=True,
            )
            for part in expert_parameters(module)
        }
        self.clock.probed, self.clock.with_weights = True, weights
        for probe in self.probes.values():
            probe.arm()

    def end(self) -> dict[tuple[str, str], ExpertsSnapshot]:
        """(parameter, phase) -> snapshot of the step."""
        for probe in self.probes.values():
            probe.finish_step()
            probe.forget()
        assert not self.errors
        assert not _get_current_function_mode_stack()
        return {(s.module.rpartition(".")[2], s.phase): s for s in self.sent}


def rows_of(each: ExpertsSnapshot, config: AgentConfig = CONFIG) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for table, row in measure_step([each], config, recipes={}, history=WeightHistory()):
        found.setdefault(table, []).append(finished(row))
    for table, rows in found.items():
        to_columns(table, rows)  # has every column
    return found


class ByHand:
    """Operands of every expert of a `Qwen3MoeExperts`-like module, by the definition of the model."""

    def __init__(self, experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        self.operands: dict[str, list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]] = {"up": [], "down": []}
        out = torch.zeros_like(x)
        products: list[tuple[str, int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for e in range(experts.num_experts):
            slot, token = torch.where((chosen == e).T)
            if not len(token):
                continue
            gate_up = x[token] @ experts.gate_up_proj[e].T
            gate, up = gate_up.chunk(2, -1)
            hidden = nn.functional.silu(gate) * up
            down = hidden @ experts.down_proj[e].T
            products.append(("up", e, x[token], experts.gate_up_proj[e], gate_up))
            products.append(("down", e, hidden, experts.down_proj[e], down))
            out = out.index_add(0, token, down * weights[token, slot, None])
        gradients = torch.autograd.grad(out.square().sum(), [product[4] for product in products])
        for (name, e, a, w, _), g in zip(products, gradients, strict=True):
            self.operands[name].append((e, a.detach(), w.detach(), g))


def experts_and_call(implementation: str) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A module with one expert that is sent nothing, one that is sent one token, and some with a short last tile."""
    experts = tiny(implementation=implementation).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, 64, generator=generator) * torch.logspace(0, 1, 64)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(70)])  # 4: nothing, 5: one token
    chosen[11, 0] = 5
    return experts, (x, chosen, torch.rand(70, 2, generator=generator))


ROLES = ("x_fwd", "w_fwd", "g_dgrad", "w_dgrad", "g_wgrad", "x_wgrad")


def operands(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each role, in their order."""
    yield from ((x, w.T), (w, x.T), (g, w), (w.T, g.T), (g.T, x), (x.T, g))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_sums_of_a_layer_are_those_of_its_experts_by_hand(implementation: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "CPU_ROWS", 512)
    monkeypatch.setattr(snapshot, "CPU_FEATURES", 512)
    experts, call = experts_and_call(implementation)
    watched = Watched(experts, every=True)
    experts(*call).square().sum().backward()
    sent = watched.end()
    by_hand = ByHand(experts, *call)
    for part, name in (("gate_up_proj", "up"), ("down_proj", "down")):
        found = rows_of(sent[part, "train"], AgentConfig(whatifs=("of:0.5",), experts=-1))
        tensors = {row["role"]: row for row in found["tensors"]}
        single = {(row["role"], row["expert"]): row for row in found["experts"]}
        assert {expert for _, expert in single} == {0, 1, 2, 3, 5}
        assert single["x_fwd", 5]["rows"] == 1
        totals = {
            role: dict.fromkeys(("n", "n_zeroed", "sum_x2", "sum_e2", "sum_scale2", "out_e2"), 0.0) for role in ROLES
        }
        for e, x, w, g in by_hand.operands[name]:
            for role, (a, b) in zip(ROLES, operands(x, w, g), strict=True):
                if implementation == "grouped_mm" and role.endswith("wgrad"):
                    continue  # its tokens stand in another order, and so share other blocks
                d = reference.decompose(a.numpy())
                e_b = (torch.from_numpy(d.q) - a.double()) @ b.double()
                hand = {key: d.values[key] for key in totals[role] if key != "out_e2"}
                hand["out_e2"] = float(e_b.square().sum())
                for key, value in hand.items():
                    assert single[role, e][key] == pytest.approx(value, rel=1e-6), (role, e, key)
                    totals[role][key] += value
        for role in ROLES:
            if implementation == "eager" or not role.endswith("wgrad"):
                for key, value in totals[role].items():
                    assert tensors[role][key] == pytest.approx(value, rel=1e-6), (role, key)


def test_sampled_experts_and_rows_are_whole_tiles_of_their_own():
    experts = tiny(experts=64).model.layers[0].mlp.experts
    watched = Watched(experts)
    x = torch.randn(4096, 64)
    chosen = (torch.arange(4096) * 37 % 64)[:, None]
    x[:, 0] = chosen[:, 0]
    experts(x, chosen, torch.ones(4096, 1)).sum().backward()
    sampled = watched.end()["gate_up_proj", "train"]
    assert len(sampled.pieces) == 8
    for piece in sampled.pieces:
        assert (piece.x.shape[1], int(piece.counts)) == (32, 64)
        assert piece.x[0, :, 0].tolist() == [piece.experts[0]] * 32
        assert int(piece.index[0]) % 32 == 0
    (row,) = [row for row in rows_of(sampled)["tensors"] if row["role"] == "x_fwd"]
    assert row["sampled_frac"] == 8 * 32 / 4096
    assert row["n_clusters"] == 8 * 32
    spread = {row["measure"]: row for row in rows_of(sampled)["expert_spread"] if row["role"] == "x_fwd"}
    assert (spread["rows"]["q0"], spread["rows"]["q100"]) == (64.0, 64.0)
    assert (spread["error"]["n_experts"], spread["error"]["n_called"], spread["error"]["n_measured"]) == (64, 64, 8)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_way_of_calling_experts_is_read(family: str, implementation: str):
    model = tiny(family, implementation=implementation)
    watched = Watched(model.model.layers[1].mlp.experts)
    ids = tokens(2, 20)
    with torch.no_grad():
        model(ids)
    model(ids, labels=ids).loss.backward()
    sent = watched.end()
    assert set(sent) == {(part, phase) for part in ("gate_up_proj", "down_proj") for phase in ("train", "eval")}
    for each in sent.values():
        found = rows_of(each)
        (output,) = found["outputs"]
        assert output["exact"]
        assert output["recipe_x"] == "none"
        if each.phase == "train":
            assert [row["role"] for row in found["tensors"]] == list(ROLES)
            assert {row["gemm"] for row in found["gradients"]} == {"wgrad", "dgrad"}
    assert {probe.train_rows for probe in watched.probes.values()} == {2 * 20 * 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_is_measured_once(reentrant: bool):
    model = tiny()
    layer = model.model.layers[0].mlp
    watched = Watched(layer.experts)
    x = torch.randn(1, 20, 64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    sent = watched.end()
    assert set(sent) == {("gate_up_proj", "train"), ("down_proj", "train")}
    assert all(piece.gradient is not None for each in sent.values() for piece in each.pieces)
    assert watched.probes["down_proj"].train_rows == 40


def test_rows_of_padding_are_not_counted():
    model = tiny(implementation="grouped_mm")
    experts = model.model.layers[0].mlp.experts
    x, chosen = torch.randn(10, 64), torch.arange(10)[:, None] % 5
    x[5:] = 0.0
    watched = Watched(experts)
    experts(x, chosen, torch.ones(10, 1)).sum().backward()
    found = rows_of(watched.end()["gate_up_proj", "train"])
    (row,) = [row for row in found["tensors"] if row["role"] == "x_fwd"]
    assert row["n"] == 5 * 64
    assert row["n_blocks"] == 5 * 2
    assert sum(row["code_hist"]) == row["n"]


def test_an_expert_with_outliers_is_the_worst_of_its_layer():
    model = tiny()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[3, :, ::32] *= 40.0
    watched = Watched(experts)
    ids = tokens(4, 30)
    model(ids, labels=ids).loss.backward()
    single = rows_of(watched.end()["gate_up_proj", "train"])["experts"]
    worst = {(row["role"], row["expert"]): row["rank_zeroed"] for row in single}
    assert worst["w_fwd", 3] == 0
    by_zeroed = sorted(row["n_zeroed"] / row["n"] for row in single if row["role"] == "w_fwd")
    assert by_zeroed[-1] > 3 * by_zeroed[-2]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_an_expert_that_another_kernel_transposes_is_named(implementation: str):
    """A square weight, read the wrong way round for one expert and in generation only."""
    experts = square_experts(implementation)
    watched = Watched(experts, name="layers.7.mlp.experts")
    x, chosen, weights = torch.randn(64, 64), torch.arange(64)[:, None] % 4, torch.ones(64, 1)
    with torch.no_grad(), Transposing(expert=2):
        experts(x, chosen, weights)
    experts(x, chosen, weights).sum().backward()
    sent = watched.end()
    state: dict[str, Any] = {"recipes": {}, "history": WeightHistory(), "told": {}}
    told = [
        row["event"].words
        for phase in ("eval", "train")
        for table, row in measure_step([sent["down_proj", phase]], CONFIG, **state)
        if table == "events"
    ]
    assert told == [
        "layers.7.mlp.experts.down_proj expert 2 eval: computes with the transpose of its weights; "
        "the layer's other experts: none"
    ]


class Transposing(TorchFunctionMode):
    """Stands for an engine's kernel: what it returns is not what its arguments say."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self._expert = expert
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "linear" and args[1].shape == (64, 64) and args[1].storage_offset() // 4096 == self._expert:
            return func(args[0], args[1].T)
        if name == "_grouped_mm" and args[1].shape[1:] == (64, 64):
            w = args[1].clone()
            w[self._expert] = w[self._expert].T.clone()
            return func(args[0], w, **kwargs)
        return func(*args, **(kwargs or {}))


def square_experts(implementation: str) -> Any:
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=1, hidden_act="silu"
    )
    config._experts_implementation = implementation
    experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def test_an_expert_that_computes_with_another_one_s_weights_is_named():
    experts = square_experts("eager")
    watched = Watched(experts)
    x, chosen, weights = torch.randn(64, 64), torch.arange(64)[:, None] % 4, torch.ones(64, 1)
    with torch.no_grad(), Exchanging():
        experts(x, chosen, weights)
    found = rows_of(watched.end()["down_proj", "eval"])
    assert [row["detail"].partition("; ")[0] for row in found["events"]] == [
        "experts.down_proj expert 1 eval: computes with the weights of expert 3"
    ]


class Exchanging(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_down = getattr(func, "__name__", "") == "linear" and args[1].shape == (64, 64)
        if is_down and args[1].storage_offset() == 4096:
            return func(args[0], args[1].as_strided((64, 64), (64, 1), 3 * 4096))
        return func(*args, **(kwargs or {}))


def test_a_forward_that_raises_leaves_no_mode_behind():
    experts = square_experts("eager")
    watched = Watched(experts)
    with pytest.raises(IndexError):
        experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(3, 1))
    assert not _get_current_function_mode_stack()
    assert not watched.sent
    experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(4, 1)).sum().backward()
    sent = watched.end()
    assert set(sent) == {("gate_up_proj", "train"), ("down_proj", "train")}
    assert all(piece.gradient is not None for each in sent.values() for piece in each.pieces)
    assert {probe.train_rows for probe in watched.probes.values()} == {4}  # of the call that came to its end


def test_taken_off_by_another_thread_in_the_middle_of_a_forward():
    experts = square_experts("eager")
    watched = Watched(experts)
    experts.act_fn = TakesOff(list(watched.probes.values()), experts.act_fn)
    experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(4, 1))
    assert not _get_current_function_mode_stack()
    assert not experts._forward_hooks
    assert not experts._forward_pre_hooks
    assert not watched.end()


class TakesOff(nn.Module):
    def __init__(self, probes: list[ExpertsProbe], act: nn.Module) -> None:
        super().__init__()
        self.act = act
        self._take_off = [probe.remove for probe in probes]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for remove in self._take_off:
            thread = threading.Thread(target=remove)
            thread.start()
            thread.join()
        return self.act(x)


def test_a_watch_left_by_an_interrupt_holds_nothing_once_it_is_taken_off():
    experts = square_experts("eager")
    watched = Watched(experts)
    experts.act_fn = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(4, 1))
    left: list[Any] = _get_current_function_mode_stack()
    held = [weakref.ref(probe._filling) for probe in watched.probes.values()]  # pyright: ignore
    assert len(left) == len(held) == 2
    for probe in watched.probes.values():
        thread = threading.Thread(target=probe.remove)
        thread.start()
        thread.join()
    assert [each() for each in held] == [None, None]
    nn.functional.linear(torch.randn(2, 64), experts.down_proj[0])
    for watch in reversed(left):
        watch.leave()
    assert not watched.end()


class Interrupting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_a_mode_of_the_user_s_that_stays_on_is_left_in_place():
    experts = square_experts("eager")
    watched = Watched(experts)
    users = Exchanging()
    experts.register_forward_pre_hook(lambda *_: users.__enter__() and None)  # ours comes before: theirs is on top
    experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(4, 1))
    assert _get_current_function_mode_stack() == [users]
    users.__exit__(None, None, None)
    watched.end()


def test_emulated_experts_show_their_operands_before_rounding_and_the_recipe_is_read_off():
    model = tiny()
    experts = model.model.layers[0].mlp.experts
    with mxprobe.emulate(model, "paper"):
        watched = Watched(experts)
        ids = tokens(2, 20)
        model(ids, labels=ids).loss.backward()
        sent = watched.end()
    for each in sent.values():
        found = rows_of(each)
        (output,) = found["outputs"]
        assert output["exact"]
        assert (output["recipe_x"], output["recipe_w"]) == ("mxfp4+rceil", "mxfp4+rceil")
        error = {row["role"]: row["sum_e2"] / row["sum_x2"] for row in found["tensors"]}
        assert set(error) == set(ROLES)
        assert min(error.values()) > 0.005  # not those of operands that were rounded before


def test_watched_features_are_spread_over_all_experts():
    weight = torch.arange(300.0).reshape(300, 1, 1).expand(300, 100, 512).contiguous()
    watched = watched_features(weight)
    assert watched.shape == (300, 512)
    assert watched[:, 0].tolist() == list(range(300))
    few = watched_features(torch.arange(12.0).reshape(4, 3, 1))
    assert few.flatten().tolist() == list(range(12))


def test_experts_with_a_compiled_part_are_left_alone():
    experts = square_experts("eager")
    vars(experts.act_fn)["_compiled_call_impl"] = experts.act_fn._call_impl  # what `act_fn.compile()` sets
    watched = Watched(experts)
    experts(torch.randn(4, 64), torch.full((4, 1), 2), torch.ones(4, 1)).sum().backward()
    assert not watched.end()
    assert "torch.compile" in watched.probes["down_proj"].why_unread


def test_a_hook_that_waits_for_a_gradient_holds_no_operand():
    parameter, seen = torch.randn(4, 8, 16), list[Any]()
    watch = GemmWatch({"w": parameter}, lambda gemm: seen.append((gemm.rows_of, weakref.ref(gemm.x))), seen.append)
    watch.enter()
    x = torch.randn(3, 16)
    y = nn.functional.linear(x, parameter[1])
    watch.leave()
    ((rows_of, operand),) = seen
    del x
    assert operand() is None
    assert torch.equal(rows_of(y), y)


def test_a_matrix_that_is_added_to_a_product_is_no_bias():
    parameter, seen = torch.randn(4, 8, 16), list[Any]()
    watch = GemmWatch({"w": parameter}, seen.append, seen.append)
    watch.enter()
    x, bias = torch.randn(3, 16), torch.randn(8)
    torch.addmm(torch.randn(3, 8), x, parameter[1].T)
    torch.addmm(bias, x, parameter[2].T)
    watch.leave()
    (gemm,) = seen
    assert gemm.expert == 2
    assert gemm.bias is bias


@pytest.mark.parametrize(("dim", "index"), [(1, None), (2, None), (1, [0, 5]), (2, [3, 4, 9])])
@pytest.mark.parametrize("flipped", [False, True])
def test_sampled_experts_are_cut_to_the_sampled_features(dim: int, index: list[int] | None, flipped: bool):
    weight = torch.randn(6, 10, 10).mT if flipped else torch.randn(6, 10, 10)
    chosen, features = torch.tensor([1, 4]), None if index is None else torch.tensor(index)
    wanted = weight[chosen] if features is None else weight[chosen].index_select(dim, features)
    found = snapshot._cut(weight, chosen, features, dim)  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(found, wanted)


class Positioned(nn.Module):
    """No experts, though it owns matrices as experts do."""

    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(2, 5, 16))
        self.below = below

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.below(x + self.positions)


def test_a_fused_inference_path_below_is_left_on():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    module, x = Positioned(layer), torch.randn(2, 5, 16)
    with torch.no_grad():
        wanted = module(x)
        watched = Watched(module)
        assert torch.equal(module(x), wanted)
    assert not watched.end()
    assert "fused inference path" in watched.probes["positions"].why_unread


def test_an_expert_that_differs_is_a_finding_of_the_audit():
    what = "computes with the transpose of its weights; the layer's other experts: none"
    facts = {"expert": 2, "phase": "rollout", "layer_recipe": "none"}
    event = Event(EXPERTS, "layers.7.mlp.experts.down_proj", "transposed", facts)
    (found,) = find_pitfalls([], pd.DataFrame([{"step": 1, **event.columns()}]))
    assert (found.pitfall.slug, found.modules) == ("expert_differs", ("layers.7.mlp.experts.down_proj",))
    assert found.detail == f"expert 2 rollout: {what}"
