"""A checkpoint: one safetensors file, or a HuggingFace directory with its shards and its config."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxprobe.errors import UsageError

from .safetensors_file import SafetensorsFile, StoredTensor

INDEX = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """Readable tensors by name, each with its file; sentences for what is missing or damaged."""

    path: Path
    tensors: dict[str, tuple[SafetensorsFile, StoredTensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """`config.json`, {} where there is none."""

    @property
    def fingerprint(self) -> list[list[Any]]:
        """Name, size and time of change of each file: equal when the checkpoint has not changed."""
        files = {file.path for file, _ in self.tensors.values()}
        stats = [(path, path.stat()) for path in sorted(files)]
        return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read all headers; no tensor is loaded.

    Raises:
        UsageError: nothing there, no safetensors in it, or not one tensor can be read.
    """
    if not path.exists():
        raise UsageError(f"no checkpoint at {path}", remedy="give a safetensors file or a directory that holds some")
    checkpoint = Checkpoint(path)
    if path.is_dir():
        checkpoint.config = _read_json(path / "config.json", checkpoint)
        _add_directory(path, checkpoint)
    else:
        checkpoint.config = _read_json(path.with_name("config.json"), checkpoint)
        _add_file(path, checkpoint)
    if not checkpoint.tensors:
        raise UsageError(
            f"no tensor in {path} can be read" if checkpoint.problems else f"{path} holds no tensors",
            cause="; ".join(checkpoint.problems[:5]),
        )
    return checkpoint


def _add_directory(path: Path, checkpoint: Checkpoint) -> None:
    index = _read_json(path / INDEX, checkpoint).get("weight_map") or {}
    if index:
        for name in sorted(set(index.values())):
            expected = [tensor for tensor, shard in index.items() if shard == name]
            shard = path / Path(name).name
            if not shard.exists():
                checkpoint.problems.append(
                    f"{name}: the index names it but it is missing, and with it {len(expected)} tensors "
                    f"({', '.join(sorted(expected)[:3])}{', ...' * (len(expected) > 3)})"
                )
                continue
            file = _add_file(shard, checkpoint)
            if file is None:
                continue
            said = "\n".join(file.problems)
            checkpoint.problems += [
                f"{name}: tensor {tensor}: the index names it but the file does not hold it"
                for tensor in expected
                if tensor not in file.entries and f"tensor {tensor}:" not in said
            ]
        return
    files = sorted(path.glob("*.safetensors"))
    # Some publishers put the same weights beside the shards a second time, in one file of their own naming.
    files = [file for file in files if file.name.startswith("model")] or files
    if not files:
        found = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise UsageError(
            f"{path} holds no .safetensors file",
            cause=f"its weights are in another format ({', '.join(found[:3])})"
            if found
            else "another directory was meant",
            remedy="convert them with safetensors.torch.save_file, or fetch the safetensors version",
        )
    for file in files:
        _add_file(file, checkpoint)


def _add_file(path: Path, checkpoint: Checkpoint) -> SafetensorsFile | None:
    try:
        file = SafetensorsFile(path)
    except UsageError as error:
        checkpoint.problems.append(f"{error.what}{f' ({error.cause})' if error.cause else ''}")
        return None
    checkpoint.problems += file.problems
    for name, entry in file.entries.items():
        if name in checkpoint.tensors:
            first = checkpoint.tensors[name][0].path.name
            checkpoint.problems.append(f"{path.name}: tensor {name}: {first} holds it already; that one is scanned")
            continue
        checkpoint.tensors[name] = (file, entry)
    return file


def _read_json(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        checkpoint.problems.append(f"{path.name}: cannot be read ({error}); scanned without it")
        return {}
    return data
