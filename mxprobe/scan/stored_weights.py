"""Which tensors of a checkpoint are GEMM weights, which way round they lie, and which are quantized already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .checkpoint import Checkpoint
from .safetensors_file import FLOATING, SafetensorsFile, StoredTensor

PROBED = "probed"
NOT_SELECTED = "not_selected"
NOT_LINEAR = "not_linear"
ALREADY_QUANTIZED = "already_quantized"

_TRANSPOSED_3D = {"gpt_oss", "llama4", "llama4_text"}
_TRANSPOSED_2D = {"gpt2", "openai-gpt"}
"""Model types whose parameters are [in, out]: fused experts, and Conv1D used as Linear."""


@dataclass(frozen=True)
class Weight:
    """A tensor of two or more dimensions. Only `status == PROBED` is measured; `reason` says why others are not."""

    module: str
    file: SafetensorsFile
    entry: StoredTensor
    status: str
    reason: str
    is_transposed: bool

    @property
    def n_matrices(self) -> int:
        """Experts in a fused 3-D parameter, else 1."""
        return self.entry.n_elements // max(self.n_rows * self.n_columns, 1)

    @property
    def n_rows(self) -> int:
        return self.entry.shape[-2]

    @property
    def n_columns(self) -> int:
        return self.entry.shape[-1]


def find_weights(checkpoint: Checkpoint, include: tuple[str, ...], exclude: tuple[str, ...]) -> list[Weight]:
    """List the tensors of two or more dimensions in the order of the files, without scales of quantized ones."""
    names = checkpoint.tensors
    model_type = str(checkpoint.config.get("model_type", ""))
    dtypes = {name: entry.dtype for name, (_, entry) in names.items()}
    weights: list[Weight] = []
    for name, (file, entry) in names.items():
        if len(entry.shape) < 2 or entry.n_elements == 0 or _is_scale_of_another(name, dtypes):
            continue
        module = _module_of(name)
        status, reason = _status(name, module, entry, dtypes, include, exclude)
        transposed = model_type in (_TRANSPOSED_3D if len(entry.shape) == 3 else _TRANSPOSED_2D)
        weights.append(Weight(module, file, entry, status, reason, transposed))
    return weights


def quantized_as(name: str, dtypes: Mapping[str, str]) -> str:
    """Return the format that a weight is stored in, by its dtype and the scales beside it; empty for plain floats."""
    dtype, stem = dtypes[name], name.rpartition(".")[0]
    if name.endswith("_blocks") and dtypes.get(f"{name[: -len('_blocks')]}_scales") == "U8":
        return "MXFP4 (packed E2M1 blocks of 32, E8M0 scales; as gpt-oss)"
    scale = dtypes.get(f"{stem}.weight_scale", "")
    if dtype == "F4" or (dtype == "U8" and name.endswith((".weight", ".weight_packed")) and scale):
        if scale == "F8_E4M3":
            return "NVFP4 (packed E2M1 blocks of 16, E4M3 scales)"
        if scale in ("U8", "F8_E8M0"):
            return "MXFP4 (packed E2M1 blocks of 32, E8M0 scales)"
        return f"4-bit elements with {scale or 'no'} scales"
    if dtype.startswith("F8_"):
        if scale in ("U8", "F8_E8M0"):
            return f"MXFP8 ({dtype[3:]}, E8M0 scales)"
        if f"{stem}.weight_scale_inv" in dtypes:
            return f"FP8 ({dtype[3:]}, a scale per tile)"
        return f"FP8 ({dtype[3:]}, {'a scale per tensor or channel' if scale else 'no scale'})"
    if name.endswith((".qweight", ".weight_packed")):
        return f"packed integers ({dtype})"
    if name.endswith(".weight") and dtype in ("I8", "U8"):
        return f"8-bit storage ({dtype})"
    return ""


def settings_of_quantization(config: Mapping[str, Any]) -> str:
    """Return what `config.json` says about quantization, in a few words; empty when nothing."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(settings, dict):
        return ""
    words = [str(settings[key]) for key in ("quant_method", "quant_algo", "format", "fmt") if settings.get(key)]
    return ", ".join(dict.fromkeys(words)) or "unnamed"


def _is_scale_of_another(name: str, dtypes: Mapping[str, str]) -> bool:
    if name.endswith("_scales"):
        return f"{name[: -len('_scales')]}_blocks" in dtypes
    stem, _, last = name.rpartition(".")
    return last.startswith(("weight_scale", "weight_global_scale", "input_scale", "scales", "qzeros", "g_idx")) and any(
        f"{stem}.{weight}" in dtypes for weight in ("weight", "weight_packed", "qweight")
    )


def _module_of(name: str) -> str:
    for suffix in (".weight_packed", ".qweight", ".weight", "_blocks"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _status(
    name: str,
    module: str,
    entry: StoredTensor,
    dtypes: Mapping[str, str],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> tuple[str, str]:
    if quantized := quantized_as(name, dtypes):
        return ALREADY_QUANTIZED, f"stored as {quantized}"
    if entry.dtype not in FLOATING:
        return NOT_LINEAR, f"{entry.dtype} is not a floating point weight"
    is_experts = len(entry.shape) == 3 and "expert" in name
    if not is_experts and (len(entry.shape) != 2 or not name.endswith(".weight")):
        return NOT_LINEAR, f"{len(entry.shape)}-dimensional and not named like the weight of a GEMM"
    if not any(fnmatchcase(module, glob) for glob in include):
        return NOT_SELECTED, f"not in include ({', '.join(include)})"
    for glob in exclude:
        if fnmatchcase(module, glob):
            return NOT_SELECTED, f"excluded by {glob}"
    return PROBED, ""
