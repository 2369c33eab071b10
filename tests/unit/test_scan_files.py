"""Reading safetensors: what the library wrote comes back, and what is damaged is named and does not stop the rest."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxprobe.errors import UsageError
from mxprobe.scan.checkpoint import open_checkpoint
from mxprobe.scan.safetensors_file import FLOATING, SafetensorsFile
from mxprobe.scan.stored_weights import find_weights, settings_of_quantization


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.1.q_proj.weight")
    return {name: torch.randn(64, 96, generator=generator) for name in names} | more


@pytest.mark.parametrize("dtype", FLOATING.values())
def test_rows_are_those_the_library_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 5).to(dtype), "b": torch.randn(3, 4, 6).to(dtype), "c": torch.randn(9).to(dtype)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"made": "here"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.problems == []
    assert file.metadata == {"made": "here"}
    assert {name: entry.shape for name, entry in file.entries.items()} == {"a": (7, 5), "b": (3, 4, 6), "c": (9,)}
    assert torch.equal(file.read_rows(file.entries["a"], 2, 6), tensors["a"][2:6])
    assert torch.equal(file.read_rows(file.entries["b"], 4, 12), tensors["b"].reshape(12, 6)[4:])


def test_a_truncated_file_names_the_cut_tensors_and_gives_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(weights(), path)
    whole = SafetensorsFile(path)
    last = max(whole.entries.values(), key=lambda entry: entry.end)
    path.write_bytes(path.read_bytes()[:-1000])
    file = SafetensorsFile(path)
    assert file.problems == [
        f"x.safetensors: tensor {last.name}: the file is truncated, 1,000 of its 24,576 bytes are missing"
    ]
    assert set(file.entries) == set(whole.entries) - {last.name}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(100), "a zip archive, as torch.save writes"),
        (b"\x80\x02}q\x00." + bytes(100), "a Python pickle"),
        (b"GGUF" + bytes(100), "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the file itself"),
        (b"hello, this is a text file and nothing else", "does not start with a header"),
        (b"abc", "does not start with a header"),
        (struct.pack("<Q", 5000) + b"{" + bytes(50), "truncated within its header"),
        (struct.pack("<Q", 20) + b'{"a": [1, 2, 3, 4, 5' + bytes(50), "its header is corrupt"),
        (struct.pack("<Q", 2**40) + b"{" + bytes(50), "does not start with a header"),
    ],
)
def test_what_is_not_a_safetensors_file_is_named(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        SafetensorsFile(path)
    assert why in str(caught.value)
    assert str(path) in str(caught.value)


def with_header(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("description", "why"),
    [
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 60]}, "60 bytes cannot hold F32 [4, 4]"),
        ({"dtype": "F33", "shape": [4, 4], "data_offsets": [0, 64]}, "unknown dtype F33"),
        ({"dtype": "F32", "shape": [4, 4]}, "no readable dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 64]}, "no readable dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}, "the header is corrupt"),
        ([1, 2], "no readable dtype, shape and data_offsets"),
    ],
)
def test_a_corrupt_entry_is_named_and_the_others_are_read(description: Any, why: str, tmp_path: Path) -> None:
    good = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    path = with_header(tmp_path / "x.safetensors", {"bad": description, "good": good}, bytes(64))
    file = SafetensorsFile(path)
    assert list(file.entries) == ["good"]
    (problem,) = file.problems
    assert problem.startswith("x.safetensors: tensor bad: ")
    assert why in problem


def sharded(directory: Path) -> dict[str, torch.Tensor]:
    tensors = weights()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_sharded_directory_is_one_checkpoint_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    assert set(open_checkpoint(tmp_path).tensors) == set(tensors)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["model.layers.1.q_proj.weight"]
    assert checkpoint.problems == [
        "model-00001-of-00002.safetensors: the index names it but it is missing, and with it 2 tensors "
        "(model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.up_proj.weight)"
    ]


def test_a_tensor_that_its_shard_does_not_hold_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).problems == [
        "model-00002-of-00002.safetensors: tensor ghost.weight: the index names it but the file does not hold it"
    ]


def test_files_without_an_index_and_a_second_copy_of_the_weights(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    save_file({"tok.weight": torch.zeros(4, 4)}, tmp_path / "consolidated.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(weights())


def test_nothing_to_open_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UsageError, match=r"in another format \(pytorch_model\.bin\)"):
        open_checkpoint(tmp_path)
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UsageError, match="holds no tensors"):
        open_checkpoint(tmp_path / "empty.safetensors")


BYTES = torch.zeros(64, 16, dtype=torch.uint8)
FP8 = torch.zeros(64, 32, dtype=torch.float8_e4m3fn)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {"mlp.experts.gate_up_proj_blocks": torch.zeros(2, 64, 1, 16, dtype=torch.uint8),
             "mlp.experts.gate_up_proj_scales": torch.zeros(2, 64, 1, dtype=torch.uint8)},
            ("mlp.experts.gate_up_proj", "MXFP4 (packed E2M1 blocks of 32, E8M0 scales; as gpt-oss)"),
        ),
        (
            {"q.weight": BYTES, "q.weight_scale": FP8[:, :2].contiguous(), "q.weight_scale_2": ONE},
            ("q", "NVFP4 (packed E2M1 blocks of 16, E4M3 scales)"),
        ),
        (
            {"q.weight_packed": BYTES, "q.weight_scale": FP8[:, :2].contiguous(), "q.weight_global_scale": ONE},
            ("q", "NVFP4 (packed E2M1 blocks of 16, E4M3 scales)"),
        ),
        (
            {"q.weight_packed": BYTES, "q.weight_scale": BYTES[:, :1].contiguous()},
            ("q", "MXFP4 (packed E2M1 blocks of 32, E8M0 scales)"),
        ),
        ({"q.weight": FP8, "q.weight_scale_inv": torch.ones(1, 1)}, ("q", "FP8 (E4M3, a scale per tile)")),
        ({"q.weight": FP8, "q.weight_scale": ONE}, ("q", "FP8 (E4M3, a scale per tensor or channel)")),
        ({"q.weight": FP8, "q.weight_scale": BYTES[:, :1].contiguous()}, ("q", "MXFP8 (E4M3, E8M0 scales)")),
        (
            {"q.qweight": torch.zeros(8, 64, dtype=torch.int32), "q.scales": torch.ones(1, 64).half(),
             "q.qzeros": torch.zeros(1, 8, dtype=torch.int32)},
            ("q", "packed integers (I32)"),
        ),
    ],
)  # fmt: skip
def test_quantized_checkpoints_are_recognised(
    tensors: dict[str, torch.Tensor], expected: tuple[str, str], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (weight,) = find_weights(open_checkpoint(tmp_path), ("*",), ())
    assert (weight.module, weight.status) == (expected[0], "already_quantized")
    assert weight.reason == f"stored as {expected[1]}"


def test_what_the_config_says_about_quantization() -> None:
    assert settings_of_quantization({}) == ""
    assert settings_of_quantization({"quantization_config": {"quant_method": "mxfp4"}}) == "mxfp4"
    modelopt = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert settings_of_quantization(modelopt) == "modelopt, NVFP4"


def test_what_is_no_gemm_weight_is_left_out_with_its_reason(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 8),
        "conv1d.weight": torch.zeros(8, 1, 4),
        "A_log": torch.zeros(8, 8),
        "position_ids": torch.zeros(1, 8, dtype=torch.int64),
        "norm.weight": torch.zeros(8),
        "experts.down_proj": torch.zeros(2, 8, 8),
        "q_proj.weight": torch.zeros(8, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = find_weights(open_checkpoint(tmp_path), ("*",), ("*embed*",))
    assert {weight.module: (weight.status, weight.reason) for weight in found} == {
        "model.embed_tokens": ("not_selected", "excluded by *embed*"),
        "conv1d": ("not_linear", "3-dimensional and not named like the weight of a GEMM"),
        "A_log": ("not_linear", "2-dimensional and not named like the weight of a GEMM"),
        "position_ids": ("not_linear", "I64 is not a floating point weight"),
        "experts.down_proj": ("probed", ""),
        "q_proj": ("probed", ""),
    }
