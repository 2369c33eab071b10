"""Emulation on other people's code: torchao's fake-quantized Linear, transformers' models and fused experts."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxprobe
from mxprobe.emulation import Recipe
from mxprobe.emulation.linear import Plan, emulated_linear

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
def test_forward_and_backward_are_torchao_s_bit_for_bit(rule: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own import
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear

    torch.manual_seed(0)
    linear = nn.Linear(96, 64, dtype=dtype)
    x = torch.randn(2, 17, 96, dtype=dtype, requires_grad=True)
    g = torch.randn(2, 17, 64, dtype=dtype)
    config = MXFakeQuantizeConfig(scaling_mode=ScaleCalculationMode(rule))
    theirs = MXFakeQuantizedLinear.from_linear(linear, config, config)

    def run(module: nn.Module) -> list[torch.Tensor]:
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y, (x, linear.weight), g)]

    expected = run(theirs)
    recipe = Recipe.parse(f"qat fwd=mxfp4/{rule} w_dgrad=mxfp4/{rule}+as_forward x_wgrad=mxfp4/{rule}+as_forward")
    with mxprobe.emulate(linear, recipe):
        got = run(linear)
    assert not torch.equal(run(linear)[0], got[0])
    for ours, want in zip(got, expected, strict=True):
        assert torch.equal(ours, want)


def tiny_moe() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=40,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def test_fused_experts_are_emulated_expert_by_expert_and_routers_are_not() -> None:
    model = tiny_moe()
    tokens = torch.arange(2, 26).reshape(2, 12)
    plain = model(tokens).logits
    with mxprobe.emulate(model, "paper") as emulation:
        names = [t.name for t in emulation.touched]
        assert "model.layers.1.mlp.experts" in names
        assert "model.layers.0.self_attn.q_proj" in names
        assert not any("router" in name or name.endswith(".gate") for name in names)
        experts = model.model.layers[0].mlp.experts
        x = torch.randn(5, 64)
        chosen, weights = torch.tensor([[0], [0], [2], [2], [2]]), torch.ones(5, 1)
        plan = Plan.of(Recipe.parse("paper"))
        by_hand = torch.zeros(5, 64)
        for expert, rows in ((0, slice(0, 2)), (2, slice(2, 5))):
            gate, up = emulated_linear(x[rows], experts.gate_up_proj[expert], None, plan).chunk(2, -1)
            by_hand[rows] = emulated_linear(F.silu(gate) * up, experts.down_proj[expert], None, plan)
        assert torch.equal(experts(x, chosen, weights), by_hand)
        noisy = model(tokens).logits
        noisy.sum().backward()
        assert experts.gate_up_proj.grad is not None
    assert not torch.equal(noisy, plain)
    assert torch.equal(model(tokens).logits, plain)


def test_generation_is_told_from_scoring_in_transformers() -> None:
    model = tiny_moe().eval()
    tokens = torch.arange(2, 14).reshape(1, 12)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True

    def generated() -> torch.Tensor:
        return torch.stack(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).logits)

    with torch.no_grad():
        plain, scored = generated(), model(tokens).logits
        with mxprobe.emulate(model, "paper@rollout"):
            assert not torch.equal(generated(), plain)
            assert torch.equal(model(tokens).logits, scored)
        with mxprobe.emulate(model, "paper@train"):
            assert torch.equal(generated(), plain)
            assert not torch.equal(model(tokens).logits, scored)
        assert torch.equal(generated(), plain)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_s_adapters_stay_exact_around_an_emulated_base() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.Qwen2ForCausalLM(config), lora)
    tokens = torch.arange(2, 26).reshape(2, 12)
    plain = model(tokens).logits
    layer: Any = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64)
    with mxprobe.emulate(model, "paper") as emulation:
        left_out = {s.name.rpartition(".self_attn.")[2] for s in emulation.skipped}
        assert {"q_proj.lora_A.default", "q_proj.lora_B.default"} <= left_out
        assert any(t.name.endswith("q_proj.base_layer") for t in emulation.touched)
        adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
        base = layer.base_layer
        by_hand = emulated_linear(x, base.weight, base.bias, Plan.of(Recipe.parse("paper"))) + adapter
        assert torch.equal(layer(x), by_hand)
        noisy = model(tokens).logits
        noisy.sum().backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert trained
        assert all("lora_" in name for name in trained)
    assert not torch.equal(noisy, plain)
    assert torch.equal(model(tokens).logits, plain)
