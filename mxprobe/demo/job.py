"""A GRPO run that learns on one CPU core in seconds: the kind of job mxprobe attaches to.

It knows nothing of mxprobe. TRL's GRPOTrainer trains a randomly initialised two-layer Qwen3 (80,000 parameters)
to copy four letters; the tokenizer is built on the spot. MXFP4 is emulated by this script's own fake-quantized
Linear forward, in training and in generation separately, and one function-preserving outlier channel per block
can be planted at the inputs of q/k/v/gate/up.

    python job.py --out DIR                                    high precision throughout
    python job.py --out DIR --outliers 32 --rollout mxfp4      reward stalls near 0.5
    ... --apply FILE                                           calls FILE's enable(model) before the trainer is built

Writes DIR/metrics.jsonl (one line per step, as it trains), DIR/result.json (hash of the final parameters) and
DIR/parameters.pt.
"""

# A user's script, against libraries that are only partly typed.
# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false

import argparse
import hashlib
import json
import os
import random
import runpy
import time
from pathlib import Path

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import datasets
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

BLOCK = 32
RECIPES = ("none", "mxfp4", "stale")
VOCABULARY = ["<pad>", "<eos>", "<bos>", "<unk>", *"0123456789+-=:#abcdefghijklmnopqrstuvwxyz "]


def mxfp4(x: Tensor) -> Tensor:
    """Quantize-dequantize the last axis in blocks of 32: E8M0 scale 2^ceil(log2(amax/6)), E2M1 to nearest even."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 6.0)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 126)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    y = blocks / scale
    magnitude = y.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((torch.round(y / step) * step).clamp(-6, 6) * scale).reshape(x.shape)


class FakeQuantize(torch.autograd.Function):
    """Q(x) forward, identity backward (straight-through)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return mxfp4(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def emulate(model: nn.Module, *, train: str, rollout: str) -> None:
    """Give every Linear but lm_head an emulated forward: `train` with gradients on, `rollout` in generation."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        recipe = train if torch.is_grad_enabled() else rollout
        if recipe == "none":
            return F.linear(x, self.weight, self.bias)
        if recipe == "stale":  # an engine that was synchronised once and never again
            if "engine_weight" not in self.__dict__:
                self.__dict__["engine_weight"] = mxfp4(self.weight.detach()).clone()
            return F.linear(mxfp4(x), self.__dict__["engine_weight"], self.bias)
        return F.linear(FakeQuantize.apply(x), FakeQuantize.apply(self.weight), self.bias)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.forward = forward.__get__(module)


class DivideChannels(nn.Module):
    """Parametrization w -> w / gain per input channel."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain", gain)

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.gain  # pyright: ignore[reportOperatorIssue]


def plant_outliers(model: Qwen3ForCausalLM, gain: float) -> None:
    """Multiply one channel per 32-block of each norm's output by `gain`, and divide it out of the next weights.

    The function computed in high precision is unchanged; the blocks of q/k/v/gate/up inputs now hold an outlier.
    """
    gains = torch.ones(model.config.hidden_size)
    gains[5::BLOCK] = gain
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, consumers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.register_forward_hook(lambda module, inputs, output: output * gains)
            for linear in consumers:
                parametrize.register_parametrization(linear, "weight", DivideChannels(gains), unsafe=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def build_model(*, layers: int, hidden: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            tie_word_embeddings=False,
        )
    )


def build_dataset(seed: int) -> datasets.Dataset:
    """Prompts such as "abca=", whose answer is "abca"."""
    rng = random.Random(seed)
    answers = ["".join(rng.choice("abcd") for _ in range(4)) for _ in range(4096)]
    return datasets.Dataset.from_list([{"prompt": answer + "=", "answer": answer} for answer in answers])


def copy_reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Share of the four letters that match, by position."""
    return [
        sum(got == want for got, want in zip(completion, letters, strict=False)) / 4
        for completion, letters in zip((c[:4] for c in completions), answer, strict=True)
    ]


class MetricsFile(TrainerCallback):
    """Appends each step's numbers to metrics.jsonl. Floats are written with all their digits."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def on_log(self, args, state, control, logs=None, **_: object) -> None:
        if logs and "reward" in logs:
            numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
            self._file.write(json.dumps({"step": state.global_step, **numbers}) + "\n")


def parameters_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="job.py", description="GRPO on a tiny Qwen3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--outliers", type=float, default=0.0, help="gain of one channel per block (0: none)")
    parser.add_argument("--rollout", choices=RECIPES, default="none")
    parser.add_argument("--train", choices=RECIPES[:2], default="none")
    parser.add_argument("--apply", type=Path, help="Python file whose enable(model) is called on the model")
    return parser.parse_args(arguments)


def prepare_model(options: argparse.Namespace) -> Qwen3ForCausalLM:
    model = build_model(layers=options.layers, hidden=options.hidden)
    if options.outliers:
        plant_outliers(model, options.outliers)
    emulate(model, train=options.train, rollout=options.rollout)
    return model


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # at this size a second thread only spins
    transformers.set_seed(options.seed)

    model = prepare_model(options)
    if options.apply:
        runpy.run_path(str(options.apply))["enable"](model)

    config = GRPOConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=8,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        beta=0.0,
        entropy_coef=0.02,  # without it the policy settles on three letters of four
        temperature=1.0,
        adam_beta2=0.99,
        weight_decay=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=False,
        fp16=False,
        use_cpu=True,
        use_vllm=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=copy_reward,
        args=config,
        train_dataset=build_dataset(options.seed),
        processing_class=build_tokenizer(),
        callbacks=[MetricsFile(options.out / "metrics.jsonl")],
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    result = {"steps": options.steps, "seconds": seconds, "parameters_sha256": parameters_sha256(model)}
    torch.save(model.state_dict(), options.out / "parameters.pt")
    (options.out / "result.json").write_text(json.dumps(result) + "\n")
    print(f"{options.steps} steps in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
