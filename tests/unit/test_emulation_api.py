"""`mxprobe.emulate` on real modules: what it touches, that it leaves no trace, and the machinery it must live with."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import mxprobe
from mxprobe.emulation import NAMED_RECIPES, Recipe, active
from mxprobe.emulation.linear import Plan, emulated_linear
from mxprobe.errors import UsageError

PAPER = Plan.of(Recipe.parse("paper"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(F.silu(self.up_proj(x)))


class Model(nn.Module):
    """Three blocks and a head tied to the embedding; `generate` runs without gradients."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.lm_head = nn.Linear(width, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(x)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, n: int = 1) -> torch.Tensor:
        """Logits [B, n, vocabulary] of n greedy tokens."""
        logits: list[torch.Tensor] = []
        for _ in range(n):
            logits.append(self(tokens)[:, -1:])
            tokens = torch.cat((tokens, logits[-1].argmax(-1)), 1)
        return torch.cat(logits, 1)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


TOKENS = torch.arange(24).reshape(3, 8)


def gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Output and parameter gradients of one pass."""
    model.zero_grad()
    y = (model if run is None else run)(TOKENS)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attributes(model: nn.Module) -> list[Any]:
    return [(name, type(m), sorted(m.__dict__)) for name, m in model.named_modules()]


def test_recipe_none_trains_bit_identically(model: Model) -> None:
    twin = copy.deepcopy(model)
    with mxprobe.emulate(model, "none"):
        for trained in (model, twin):
            optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
            for _ in range(3):
                gradients(trained)
                optimizer.step()
    assert same(list(model.parameters()), list(twin.parameters()))


def test_removal_leaves_nothing_behind(model: Model) -> None:
    before, reference = attributes(model), gradients(model)
    names = list(model.state_dict())
    emulation = mxprobe.emulate(model, "paper")
    assert list(model.state_dict()) == names
    assert not same(gradients(model), reference)
    emulation.remove()
    emulation.remove()
    assert attributes(model) == before
    assert same(gradients(model), reference)
    assert active() == []


def test_an_emulated_linear_computes_what_the_function_does(model: Model) -> None:
    layer = model.layers[0].up_proj
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    with mxprobe.emulate(model, "paper"):
        assert torch.equal(layer(x), emulated_linear(x, layer.weight, layer.bias, PAPER))


def test_what_is_left_out_is_named_with_its_reason(model: Model) -> None:
    with mxprobe.emulate(model, "paper keep_first=1 keep_last=1") as emulation:
        assert [t.name for t in emulation.touched] == ["layers.1.up_proj", "layers.1.down_proj"]
        assert emulation.touched[0].shape == (80, 40)
        assert {s.name: s.reason for s in emulation.skipped} == {
            "layers.0.up_proj": "one of the first 1 blocks",
            "layers.0.down_proj": "one of the first 1 blocks",
            "layers.2.up_proj": "one of the last 1 blocks",
            "layers.2.down_proj": "one of the last 1 blocks",
            "lm_head": "excluded by *lm_head*",
        }
        assert str(emulation) == "paper keep_first=1 keep_last=1 · 2 modules emulated, 5 left out"
        assert "left out  lm_head Linear: excluded by *lm_head*" in emulation.report()


def test_tied_weights_are_emulated_where_they_multiply_and_said_to_be_shared(model: Model) -> None:
    with mxprobe.emulate(model, "paper include=lm_head exclude=") as emulation:
        (head,) = emulation.touched
        assert head.note == "weight shared with embed_tokens, which reads it unquantized"
        got = gradients(model)
        x = torch.randn(2, 40)
        assert torch.equal(model.lm_head(x), emulated_linear(x, model.lm_head.weight, None, PAPER))
    assert all(torch.isfinite(g).all() for g in got)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["paper", "paper g=mxfp4+sr x_fwd=mxfp4+sr"])
def test_activation_checkpointing_recomputes_the_same_values(model: Model, reentrant: bool, recipe: str) -> None:
    def checkpointed(tokens: torch.Tensor) -> torch.Tensor:
        x = model.embed_tokens(tokens)
        for block in model.layers:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.lm_head(x)

    with mxprobe.emulate(model, recipe):
        assert same(gradients(model), gradients(model, checkpointed))


# torch's own tracer instantiates autograd.Function, which torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_follows_every_switch_without_a_graph_break() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    block = Block(40)
    compiled: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 40, requires_grad=True)

    def passed(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *block.parameters()))]

    untouched = passed(compiled)
    with mxprobe.emulate(block, "paper") as emulation:
        for recipe in ("paper", "fwd=mxfp4+of:0.5 g=mxfp4+sr", "paper@train", "none"):
            emulation.set(recipe, now=True)
            assert same(passed(block), passed(compiled)), recipe
    assert same(passed(compiled), untouched)


def test_sides_are_told_apart_by_generate(model: Model) -> None:
    with torch.no_grad():
        plain, plain_logits = model(TOKENS), model.generate(TOKENS, 6)
    with mxprobe.emulate(model, "paper fwd=mxfp4/floor+of:0.5") as emulation, torch.no_grad():
        noisy, noisy_logits = model(TOKENS), model.generate(TOKENS, 6)
        assert not torch.equal(noisy_logits, plain_logits)
        emulation.set(emulation.recipe.on("train"), now=True)
        # Scoring without gradients is the trainer's work.
        assert torch.equal(model(TOKENS), noisy)
        assert torch.equal(model.generate(TOKENS, 6), plain_logits)
        emulation.set(emulation.recipe.on("rollout"), now=True)
        assert torch.equal(model(TOKENS), plain)
        assert torch.equal(model.generate(TOKENS, 6), noisy_logits)
        with emulation.rollout():
            assert torch.equal(model(TOKENS), noisy)
    assert torch.equal(model.generate(TOKENS, 6), plain_logits)


def test_without_generate_the_grad_mode_tells() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40))
    x = torch.randn(3, 40)
    with torch.no_grad():
        plain = model(x)
    with mxprobe.emulate(model, "paper@rollout"):
        assert torch.equal(model(x), plain)
        with torch.no_grad():
            assert not torch.equal(model(x), plain)


def test_weights_kept_in_generation_are_forgotten_after_it(model: Model) -> None:
    with mxprobe.emulate(model, "paper") as emulation:
        first = model.generate(TOKENS, 4)
        with torch.no_grad():
            for block in model.layers:
                # As some engines load weights: no version counter moves.
                block.up_proj.weight.data.neg_()
        fresh = copy.deepcopy(model)
        assert torch.equal(model.generate(TOKENS, 4), fresh.generate(TOKENS, 4))
        assert not torch.equal(model.generate(TOKENS, 4), first)
        emulation.remove()
    with mxprobe.emulate(model, "paper", keep_weights=False):
        kept_nothing = model.generate(TOKENS, 4)
    with mxprobe.emulate(model, "paper"):
        assert torch.equal(model.generate(TOKENS, 4), kept_nothing)


def test_the_recipe_switches_after_the_next_optimizer_step_from_any_thread(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mxprobe.emulate(model, "paper") as emulation:
        paper = gradients(model)
        thread = threading.Thread(target=emulation.set, args=("none",))
        thread.start()
        thread.join()
        assert same(gradients(model), paper)
        optimizer.step()
        switched = gradients(model)
        optimizer.step()
        assert (emulation.step, str(emulation.recipe)) == (2, "none")
        assert [(change.step, str(change.recipe)) for change in emulation.history] == [(0, "paper"), (1, "none")]
    assert same(switched, gradients(model))
    with pytest.raises(UsageError, match="was removed"):
        emulation.set("paper")


def test_a_recipe_that_cannot_be_used_changes_nothing(model: Model) -> None:
    with mxprobe.emulate(model, "paper") as emulation:
        for wrong, why in (("papr", "no recipe named"), ("paper include=*.q_proj", "applies to no module of Model")):
            with pytest.raises(UsageError, match=why):
                emulation.set(wrong, now=True)
        assert str(emulation.recipe) == "paper"
        assert len(emulation.touched) == 6
        with pytest.raises(UsageError, match="emulated already"):
            mxprobe.emulate(model.layers[0], "ocp")
    with pytest.raises(UsageError, match="has no nn"):
        mxprobe.emulate(nn.ReLU(), "paper")


def test_a_deep_copy_is_emulated_with_its_own_weights(model: Model) -> None:
    with mxprobe.emulate(model, "paper") as emulation:
        twin = copy.deepcopy(model)
        assert same(gradients(twin), gradients(model))
        with torch.no_grad():
            twin.layers[0].up_proj.weight.mul_(3.0)
        assert not torch.equal(twin(TOKENS), model(TOKENS))
        assert not torch.equal(twin.generate(TOKENS, 6), model.generate(TOKENS, 6))
        emulation.set("none", now=True)
        plain = twin(TOKENS)
    assert torch.equal(twin(TOKENS), plain)


@pytest.mark.parametrize("bias", [True, False])
def test_parametrized_weights_are_quantized_after_the_parametrization(bias: bool) -> None:
    class Halve(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    layer = nn.Linear(40, 48, bias=bias)
    parametrize.register_parametrization(layer, "weight", Halve(), unsafe=True)
    x = torch.randn(4, 40)
    with mxprobe.emulate(nn.Sequential(layer), "paper") as emulation:
        assert emulation.touched[0].shape == (48, 40)
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, emulated_linear(x, layer.weight, layer.bias, PAPER))
    assert layer.parametrizations.weight.original.grad is not None


class LoraLinear(nn.Linear):
    """As loralib writes it: a subclass whose forward adds a low-rank product."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.lora_A = nn.Parameter(torch.randn(4, n_in) / 8)
        self.lora_B = nn.Parameter(torch.randn(n_out, 4) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.lora_A.t() @ self.lora_B.t()


class Wrapped(nn.Module):
    """As PEFT writes it: the Linear is a child, the adapters are Linears beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_stay_in_high_precision_around_an_emulated_base() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 40)
    subclass, wrapper = LoraLinear(40, 48), Wrapped(nn.Linear(40, 48))
    model = nn.ModuleDict({"a_proj": subclass, "b_proj": wrapper})
    with mxprobe.emulate(model, "paper") as emulation:
        assert [t.name for t in emulation.touched] == ["a_proj", "b_proj.base_layer"]
        base = emulated_linear(x, subclass.weight, subclass.bias, PAPER)
        assert torch.equal(subclass(x), base + x @ subclass.lora_A.t() @ subclass.lora_B.t())
        low_rank = F.linear(F.linear(x, wrapper.lora_A["default"].weight), wrapper.lora_B["default"].weight)
        inner = wrapper.base_layer
        assert torch.equal(wrapper(x), emulated_linear(x, inner.weight, inner.bias, PAPER) + low_rank)


def test_a_subclass_around_an_emulated_child_is_not_quantized_twice() -> None:
    class Residual(nn.Linear):
        def __init__(self) -> None:
            super().__init__(40, 40)
            self.inner = nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.inner(x)

    torch.manual_seed(0)
    outer = Residual()
    x = torch.randn(4, 40)
    recipe = "fwd=mxfp4/rceil+of:0.5"  # not idempotent: a second quantization would show
    plan = Plan.of(Recipe.parse(recipe))
    with mxprobe.emulate(nn.ModuleDict({"outer": outer}), recipe):
        expected = emulated_linear(x, outer.weight, outer.bias, plan)
        assert torch.equal(outer(x), expected + emulated_linear(x, outer.inner.weight, outer.inner.bias, plan))


def test_modules_that_cannot_be_emulated_say_so() -> None:
    class Packed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    packed = nn.Linear(8, 8, bias=False)
    packed.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(32, 2), "own": Packed(8, 8), "int4": packed, "plain": nn.Linear(8, 8)}
    )
    with mxprobe.emulate(model, "paper") as emulation:
        assert [t.name for t in emulation.touched] == ["plain"]
        assert {s.name: s.reason for s in emulation.skipped} == {
            "attention.out_proj": "nn.MultiheadAttention reads its weight and never calls it",
            "own": "Packed.forward does not multiply with F.linear",
            "int4": "its weight is stored as torch.uint8: quantized already",
        }


def test_a_forward_patched_later_survives_removal_and_a_second_emulation(model: Model) -> None:
    """As accelerate does: wrap `forward` of the instance, calling the one that was there."""
    layer: Any = model.layers[0].up_proj
    x = torch.randn(4, 40)
    plain = layer(x).detach()
    emulation = mxprobe.emulate(model, "paper")
    ours = layer.forward
    layer.forward = lambda *args: ours(*args) + 1.0
    emulation.remove()
    assert torch.equal(layer(x), plain + 1.0)
    with mxprobe.emulate(model, "paper"):
        assert torch.equal(layer(x), emulated_linear(x, layer.weight, layer.bias, PAPER) + 1.0)
    assert torch.equal(layer(x), plain + 1.0)


def test_hooks_see_the_unquantized_operands(model: Model) -> None:
    layer = model.layers[0].up_proj
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], module.weight, output)))
    x = torch.randn(4, 40)
    with mxprobe.emulate(model, "paper"):
        y = layer(x)
    assert seen[0] is x
    assert seen[1] is layer.weight
    assert seen[2] is y


@pytest.mark.parametrize(
    "recipe",
    [*NAMED_RECIPES, "all=mxfp4+sr", "all=mxfp4+2d", "all=mxfp4+sr+2d", "fwd=mxfp4+had:32+of:0.5 wgrad=mxfp4+mbs:128"],
)
def test_every_shape_and_dtype_that_a_linear_takes(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 8))
    with mxprobe.emulate(model, recipe):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            model.to(dtype)
            for shape in ((40,), (0, 40), (2, 0, 40), (1, 40), (2, 3, 4, 40)):
                x = torch.randn(shape, dtype=dtype, requires_grad=True)
                y = model(x)
                y.sum().backward()
                assert (y.shape, y.dtype) == ((*shape[:-1], 8), dtype)
                assert x.grad is not None
                assert x.grad.shape == x.shape
                assert y.isfinite().all()
                assert x.grad.isfinite().all()
            with torch.inference_mode():
                assert model(torch.randn(3, 40, dtype=dtype)).isfinite().all()
