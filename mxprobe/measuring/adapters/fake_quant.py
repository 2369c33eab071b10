"""Fake-quantized subclasses of `nn.Linear`: torchao's, verl's, ModelOpt's.

All three round inside `forward` and keep `weight` as the master: a forward hook sees both operands unrounded. ModelOpt
may scale x before it rounds it (`pre_quant_scale`, the smoothing of AWQ and SmoothQuant): that product is the operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mxprobe.measuring.adapters.adapter import Reading, Signature, Unread, held
from mxprobe.measuring.adapters.torch_linear import LinearAdapter
from mxprobe.measuring.isolation import is_plain


class _SubclassAdapter(LinearAdapter):
    def recognises(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and self.signature(module) is not None


class TorchaoAdapter(_SubclassAdapter):
    family = "torchao fake-quantized"
    signatures = (
        Signature("torchao", "MXFakeQuantizedLinear", "torchao 0.18.0", ("x",), ("activation_config", "weight_config")),
        Signature("torchao", "NVFP4FakeQuantizedLinear", "torchao 0.18.0", ("x",), ("activation_config",)),
        Signature("torchao", "FakeQuantizedLinear", "torchao 0.18.0", ("x",), ("weight_fake_quantizer",)),
    )


class VerlAdapter(_SubclassAdapter):
    family = "verl QATLinear"
    signatures = (Signature("verl", "QATLinear", "verl 0.9.1", ("x",), ("mode", "group_size", "fake_quant_enabled")),)


class ModelOptAdapter(_SubclassAdapter):
    """`TensorQuantizer`s before the input, the weight and the output of any Linear."""

    family = "ModelOpt"
    signatures = (
        Signature(
            "modelopt",
            "QuantLinearConvBase",
            "nvidia-modelopt 0.47.0",
            ("input", "args", "kwargs"),
            ("input_quantizer", "weight_quantizer", "output_quantizer"),
        ),
    )
    quantizer = Signature("modelopt", "TensorQuantizer", "nvidia-modelopt 0.47.0", ("inputs",), ("_disabled",))

    def misfit(self, module: nn.Module) -> str:
        before = super().misfit(module)
        quantizer = held(module, "input_quantizer")
        if before or not isinstance(quantizer, nn.Module) or self.quantizer.class_of(quantizer) is None:
            return before  # a sequence of quantizers rounds after one another: x is still their operand
        return self.quantizer.misfit(quantizer)

    def reading(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Reading | Unread:
        reading = super().reading(module, x, y, args, kwargs)
        quantizer = held(module, "input_quantizer")
        if isinstance(reading, str) or not isinstance(quantizer, nn.Module):
            return reading
        rotate: Any = held(quantizer, "_rotate", False)  # a bool, a configuration, in old checkpoints a dict
        if rotate.get("enable", False) if isinstance(rotate, dict) else getattr(rotate, "enable", rotate):
            return "its input quantizer rotates x before it rounds it"
        scale = held(quantizer, "_pre_quant_scale")
        if scale is None or held(quantizer, "_enable_pre_quant_scale", True) is False:
            return reading
        if not is_plain(scale):
            return f"its input quantizer scales x by a {type(scale).__name__}"
        return reading._replace(operand=lambda rows: rows * scale.detach())
