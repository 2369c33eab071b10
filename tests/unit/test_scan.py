"""What a scan measures and writes: exact sums whatever the slabs, both directions, resumption, problems."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxprobe.errors import TraceError, UsageError
from mxprobe.scan import weight_error
from mxprobe.scan.scanner import Progress, scan
from mxprobe.scan.settings import ScanSettings
from mxprobe.scan.summary import summarise
from mxprobe.trace import open_trace
from mxprobe_kernels import apply_correction, decompose, quantize_dequantize

NO_WHATIF = ScanSettings(whatifs=())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def checkpoint(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config or {}))
    return directory


def rows_of(trace: Path, table: str = "tensors") -> dict[tuple[str, str], Any]:
    frame = open_trace(trace).table(table)
    return {(str(row.module), str(row.role)): row for row in frame.itertuples()}


def agrees(row: Any, tensor: torch.Tensor, dim: int, format: str = "mxfp4") -> bool:
    expected = decompose(tensor, dim=dim, format=format).to_dict()
    counts = all(getattr(row, name) == expected[name] for name in ("n", "n_zeroed", "n_deadzone", "n_blocks", "amax"))
    sums = all(
        getattr(row, name) == pytest.approx(expected[name], rel=1e-6) for name in ("sum_x2", "sum_e2", "sum_dz2")
    )
    return counts and sums and list(row.delta_hist) == expected["delta_hist"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slabs_give_the_sums_of_the_whole_tensor(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_error, "SLAB_ELEMENTS", 40 * 75)  # one block of rows a slab, the last one ragged
    tensor = normal(150, 75).to(dtype)
    tensor[3, 5] = 40.0
    scan(checkpoint(tmp_path / "c", {"q.weight": tensor}), tmp_path / "t", NO_WHATIF)
    rows = rows_of(tmp_path / "t")
    assert agrees(rows["q", "w_fwd"], tensor, -1)
    assert agrees(rows["q", "w_dgrad"], tensor, 0)
    assert (rows["q", "w_fwd"].n_clusters, rows["q", "w_dgrad"].n_clusters) == (150, 75)
    assert {row.phase for row in rows.values()} == {"eval"}


def test_a_tensor_scale_sees_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_error, "SLAB_ELEMENTS", 40 * 64)
    tensor = normal(160, 64)
    tensor[3, 5] = 4000.0
    settings = ScanSettings(format="nvfp4", whatifs=())
    scan(checkpoint(tmp_path / "c", {"q.weight": tensor}), tmp_path / "t", settings)
    assert agrees(rows_of(tmp_path / "t")["q", "w_fwd"], tensor, -1, "nvfp4")


@pytest.mark.parametrize(("model_type", "along_in"), [("qwen3_moe", -1), ("gpt_oss", 1)])
def test_fused_experts_are_matrices_of_their_own(model_type: str, along_in: int, tmp_path: Path) -> None:
    experts = normal(3, 40, 70)  # 40 rows: a block that ran on into the next expert would change the sums
    path = checkpoint(tmp_path / "c", {"mlp.experts.down_proj": experts}, {"model_type": model_type})
    scan(path, tmp_path / "t", NO_WHATIF)
    rows = rows_of(tmp_path / "t")
    along_out = 1 if along_in == -1 else -1
    assert agrees(rows["mlp.experts.down_proj", "w_fwd"], experts, along_in)
    assert agrees(rows["mlp.experts.down_proj", "w_dgrad"], experts, along_out)


def test_whatifs_measured_on_everything_are_exact(tmp_path: Path) -> None:
    tensor = normal(64, 96)
    settings = ScanSettings(whatifs=("rule:even", "mbs:32"), whatif_elements=10**6)
    scan(checkpoint(tmp_path / "c", {"q.weight": tensor}), tmp_path / "t", settings)
    frame = open_trace(tmp_path / "t").whatif()
    assert len(frame) == 4
    for row in frame.itertuples():
        dim = -1 if str(row.role) == "w_fwd" else 0
        q = apply_correction(tensor, str(row.correction), dim=dim)
        assert row.sum_e2 == pytest.approx(float((q - tensor).double().square().sum()), rel=1e-6)
        assert (row.n, row.n_zeroed, row.sampled_frac) == (tensor.numel(), int((q == 0).sum()), 1.0)


def test_sampled_whatifs_estimate_the_whole(tmp_path: Path) -> None:
    """Within 4 % from an eighth of a tensor whose rows differ a hundredfold in size."""
    tensor = normal(2048, 256) * torch.logspace(-1, 1, 2048)[:, None]
    settings = ScanSettings(whatifs=("mbs:32", "rule:ceil"), whatif_elements=65_536)
    scan(checkpoint(tmp_path / "c", {"q.weight": tensor}), tmp_path / "t", settings)
    for row in open_trace(tmp_path / "t").whatif().itertuples():
        q = apply_correction(tensor, str(row.correction), dim=-1 if str(row.role) == "w_fwd" else 0)
        assert row.sampled_frac == pytest.approx(1 / 8)
        assert row.sum_e2 == pytest.approx(float((q - tensor).double().square().sum()), rel=0.04)


def test_a_correction_that_hurts_weights_on_the_grid_is_seen_to(tmp_path: Path) -> None:
    tensor = quantize_dequantize(normal(64, 128))[0]
    settings = ScanSettings(whatifs=("mbs:128",), whatif_elements=4096)
    scan(checkpoint(tmp_path / "c", {"q.weight": tensor}), tmp_path / "t", settings)
    forward = open_trace(tmp_path / "t").whatif().iloc[0]
    assert rows_of(tmp_path / "t")["q", "w_fwd"].sum_e2 == 0.0
    assert forward["sum_e2"] == pytest.approx(
        float((apply_correction(tensor, "mbs:128") - tensor).double().square().sum()), rel=0.2
    )


def test_a_nan_is_a_finding_and_spoils_nothing_else(tmp_path: Path) -> None:
    tensor = normal(64, 64)
    clean = decompose(tensor[:, 32:]).sum_e2
    tensor[:, 3] = float("nan")
    path = checkpoint(tmp_path / "c", {"q.weight": tensor, "k.weight": normal(32, 32)})
    scan(path, tmp_path / "t", ScanSettings(whatifs=("mbs:32",)))
    row = rows_of(tmp_path / "t")["q", "w_fwd"]
    assert (row.n_nonfinite, row.n_blocks_excluded) == (64, 64)
    assert row.sum_e2 == pytest.approx(clean)
    assert open_trace(tmp_path / "t").whatif()["sum_e2"].notna().all()
    assert summarise(open_trace(tmp_path / "t"))["nonfinite"] == ["q"]


class StoppedError(Exception):
    pass


def stop_at(n_bytes: int) -> Any:
    def on_progress(progress: Progress) -> None:
        if progress.done_bytes >= n_bytes:
            raise StoppedError

    return on_progress


def layers(count: int = 6) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.q_proj.weight": normal(64, 64, seed=i) for i in range(count)}


def test_a_stopped_scan_goes_on_and_ends_in_the_same_rows(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", layers() | {"lm_head.weight": normal(64, 64)})
    settings = ScanSettings(whatifs=("mbs:32",))
    scan(path, tmp_path / "whole", settings)
    for n_bytes in (3 * 64 * 64 * 4, 2 * 64 * 64 * 4):
        with pytest.raises(StoppedError):
            scan(path, tmp_path / "t", settings, on_progress=stop_at(n_bytes))
    result = scan(path, tmp_path / "t", settings)
    assert (result.n_scanned, result.n_resumed) == (6, 3)
    resumed, whole = open_trace(tmp_path / "t"), open_trace(tmp_path / "whole")
    assert resumed.is_complete
    assert resumed.problems == []
    for table, key in (("tensors", ["module", "role"]), ("whatif", ["module", "role"]), ("modules", ["module"])):
        frames = [trace.table(table).drop(columns="time_ns") for trace in (resumed, whole)]
        frames = [frame.astype(dict.fromkeys(key, str)).sort_values(key).reset_index(drop=True) for frame in frames]
        assert frames[0].astype(str).equals(frames[1].astype(str))
    assert not (tmp_path / "t.resuming").exists()


def test_a_scan_killed_while_it_took_over_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "c", layers())
    with pytest.raises(StoppedError):
        scan(path, tmp_path / "t", NO_WHATIF, on_progress=stop_at(4 * 64 * 64 * 4))
    with monkeypatch.context() as patch:
        patch.setattr("mxprobe.scan.scanner.take_over", lambda *args: (_ for _ in ()).throw(StoppedError))
        with pytest.raises(StoppedError):
            scan(path, tmp_path / "t", NO_WHATIF)
    assert scan(path, tmp_path / "t", NO_WHATIF).n_resumed == 3


def test_another_scan_is_not_continued(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", layers())
    with pytest.raises(StoppedError):
        scan(path, tmp_path / "t", NO_WHATIF, on_progress=stop_at(4 * 64 * 64 * 4))
    with pytest.raises(UsageError, match=r"unfinished scan of something else \(rule differ\)"):
        scan(path, tmp_path / "t", ScanSettings(whatifs=(), rule="even"))
    save_file(layers(5), path / "model.safetensors")
    with pytest.raises(UsageError, match=r"something else \(files differ\)"):
        scan(path, tmp_path / "t", NO_WHATIF)
    scan(path, tmp_path / "other", NO_WHATIF)
    with pytest.raises(TraceError, match="already holds a trace"):
        scan(path, tmp_path / "other", NO_WHATIF)


def test_damage_is_recorded_and_the_rest_is_scanned(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", layers(3))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result = scan(path, tmp_path / "t", NO_WHATIF)
    assert result.n_scanned == 2
    (problem,) = result.problems
    assert "model.safetensors: tensor layers.2.q_proj.weight: the file is truncated" in problem
    trace = open_trace(tmp_path / "t")
    assert trace.events()[["kind", "detail"]].astype(str).values.tolist() == [["unreadable", problem]]
    assert summarise(trace)["problems"] == [problem]


def test_a_file_that_shrinks_during_the_scan_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", layers(3))
    file = path / "model.safetensors"
    content = file.read_bytes()

    def shrink(progress: Progress) -> None:
        file.write_bytes(content[: len(content) // 2])

    result = scan(path, tmp_path / "t", NO_WHATIF, on_progress=shrink)
    assert result.n_scanned == 1
    assert "bytes could be read" in result.problems[0]
    assert all("model.safetensors: tensor layers." in problem for problem in result.problems)


def test_quantized_weights_are_counted_not_measured(tmp_path: Path) -> None:
    packed = {
        "a.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
        "b.weight": normal(32, 32),
    }
    result = scan(checkpoint(tmp_path / "c", packed), tmp_path / "t", NO_WHATIF)
    assert result.quantized == {"FP8 (E4M3, a scale per tensor or channel)": 1}
    assert {module for module, _ in rows_of(tmp_path / "t")} == {"b"}
    modules = open_trace(tmp_path / "t").modules().set_index("module")
    assert modules.loc["a", "status"] == "already_quantized"


def test_nothing_to_scan_and_wrong_settings_are_said_in_words(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", {"lm_head.weight": normal(32, 32)})
    with pytest.raises(UsageError, match=r"no weight to scan\n.*excluded by \*lm_head\*"):
        scan(path, tmp_path / "t", NO_WHATIF)
    for wrong, why in (({"format": "fp3"}, "unknown format"), ({"rule": "up"}, "unknown scale rule")):
        with pytest.raises(UsageError, match=why):
            ScanSettings(**wrong)
    with pytest.raises(UsageError, match="unknown correction"):
        ScanSettings(whatifs=("mbs128",))
