"""The model of a checkpoint, built from its config and weights with `transformers`, for real inputs on the CPU.

Weights are float32 whatever they are stored in: bfloat16 products would round the very errors that are measured.
No code from the checkpoint is run, and nothing is fetched.
"""

# transformers is only partly typed.
# pyright: basic

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxprobe.errors import UsageError

from .checkpoint import Checkpoint
from .safetensors_file import FLOATING
from .stored_weights import ALREADY_QUANTIZED, Weight

_MEMORY_MARGIN = 1.25
"""Activations and copies, beside 4 bytes a parameter."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_UNUSED = ("pooler.",)
"""Parts without which every other layer computes what it should."""


@dataclass(frozen=True)
class BuiltModel:
    model: nn.Module
    class_name: str
    is_causal: bool
    """It returns next-token logits, so that Delta2 is defined."""
    vocabulary: int
    max_tokens: int
    directory: Path

    def tokenize(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line by the checkpoint's tokenizer. UsageError when it has none."""
        from transformers import AutoTokenizer

        with _quiet():
            try:
                # Without this some classes come with an empty vocabulary instead of an error.
                if not any((self.directory / name).exists() for name in _TOKENIZER_FILES):
                    raise FileNotFoundError(f"none of {', '.join(_TOKENIZER_FILES)} is there")
                tokenizer = AutoTokenizer.from_pretrained(
                    str(self.directory), local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # whatever a damaged tokenizer makes foreign code raise
                raise UsageError(
                    f"no tokenizer of {self.directory} can be built",
                    cause=first_line(error),
                    remedy="add the model's tokenizer files, or give token ids (.npy, .safetensors) for --calibration",
                ) from None
            return tokenizer(list(lines), truncation=False)["input_ids"]

    def linears(self, modules: set[str]) -> dict[str, nn.Linear]:
        """Return the Linears to watch, by the checkpoint's name of their weight, as far as it is in `modules`.

        A checkpoint and a model name the same layer with and without the base model's prefix.
        """
        from mxprobe.measuring.adapters.weight_modules import take_inventory

        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        found: dict[str, nn.Linear] = {}
        for entry in take_inventory([self.model], ("*",)):
            if not (entry.selected and isinstance(entry.module, nn.Linear)):
                continue
            names = (entry.name, f"{prefix}{entry.name}", entry.name.removeprefix(prefix))
            name = next((name for name in names if name in modules), None)
            if name is not None:
                found[name] = entry.module
        return found


def build_model(checkpoint: Checkpoint, weights: Sequence[Weight]) -> BuiltModel:
    """Build the model, in evaluation mode, without gradients.

    Raises:
        UsageError: it cannot be built: no config, an unknown architecture, code of its own, quantized weights,
            weights missing, not enough memory, or transformers is not installed.
    """
    directory = _directory(checkpoint)
    _check(checkpoint, weights)
    with _quiet():
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(str(directory), **local)
            if getattr(config, "is_encoder_decoder", False):
                raise ValueError("it is an encoder-decoder, which needs inputs of its decoder as well")
            names = getattr(config, "architectures", None) or []
            is_causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
            build = AutoModelForCausalLM if is_causal else AutoModel
            loaded: Any = build.from_pretrained(
                str(directory), config=config, dtype=torch.float32, output_loading_info=True, **local
            )
            model, found = loaded
        except Exception as error:  # whatever the config makes foreign code raise
            raise _cannot_build(directory, first_line(error)) from None
    missing = sorted(name for name in found["missing_keys"] if not name.startswith(_UNUSED))
    if missing:
        listed = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        raise _cannot_build(directory, f"the checkpoint lacks {len(missing)} of its weights ({listed})")
    model.eval().requires_grad_(False)
    text = config.get_text_config()
    max_tokens = getattr(text, "max_position_embeddings", None) or 1 << 30
    return BuiltModel(model, type(model).__name__, is_causal, int(text.vocab_size), int(max_tokens), directory)


def _directory(checkpoint: Checkpoint) -> Path:
    path = checkpoint.path
    if path.is_dir() or path.name == "model.safetensors":
        return path if path.is_dir() else path.parent
    raise UsageError(
        f"--calibration needs the whole model, and {path.name} may be a part of one",
        remedy="give the checkpoint's directory",
    )


def _check(checkpoint: Checkpoint, weights: Sequence[Weight]) -> None:
    directory = _directory(checkpoint)
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "--calibration builds the model with transformers, which is not installed",
            remedy='pip install "mxprobe[scan]", or scan without --calibration',
        )
    if not checkpoint.config.get("model_type"):
        raise _cannot_build(directory, "it has no config.json that names a model_type")
    if checkpoint.problems:
        raise _cannot_build(directory, f"it cannot be read in full: {checkpoint.problems[0]}")
    quantized = next((weight for weight in weights if weight.status == ALREADY_QUANTIZED), None)
    if quantized is not None:
        raise _cannot_build(directory, f"there is no high-precision model in it: {quantized.module} {quantized.reason}")
    n_parameters = sum(entry.n_elements for _, entry in checkpoint.tensors.values() if entry.dtype in FLOATING)
    needed, free = 4 * n_parameters * _MEMORY_MARGIN, _available_bytes()
    if free is not None and needed > free:
        raise _cannot_build(
            directory, f"in float32 it needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )


def _cannot_build(directory: Path, cause: str) -> UsageError:
    return UsageError(
        f"the model of {directory} cannot be built, so there are no activations to measure",
        cause=cause,
        remedy="scan its weights alone, without --calibration",
    )


def _available_bytes() -> int | None:
    """Return the memory that new processes can have; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def first_line(error: Exception) -> str:
    """Return kind and first line of what foreign code raised."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@contextmanager
def _quiet() -> Generator[None]:
    """Keep progress bars, advice and load reports of transformers off the terminal for a while."""
    from transformers.utils import logging

    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()
