"""Code that switches a correction on: a framework's own knob where it has one, else plain PyTorch.

The PyTorch code is self-contained emulation: it gives the named Linears a forward that quantizes the same operands
as the run, with scales by `rceil`, and corrects the named ones. It shows the effect, not the speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from textwrap import indent, wrap

from mxprobe.errors import UsageError
from mxprobe.schema import Role
from mxprobe_kernels.formats import Rule
from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

from .knobs import SAME_AS, WHERE_TO_CALL, knob_for
from .recommendation import OperandGroup, Snippet
from .words import correction_words, listed, place, sentence

TORCH_FRAMEWORKS = ("trl", "transformers", "torch", "torchao")
FRAMEWORKS = (*TORCH_FRAMEWORKS, "verl", "nemo-rl", "openrlhf", "alto", "megatron", *SAME_AS)


@dataclass(frozen=True)
class Emulated:
    """Which sides the run quantizes already, and whether in generation only."""

    x: bool = True
    w: bool = True
    rollout_only: bool = False


def snippet_for(correction: str, where: Sequence[OperandGroup], framework: str, emulated: Emulated) -> Snippet:
    """The snippet for a correction on the named operands.

    Raises:
        UsageError: unknown framework.
    """
    if framework not in FRAMEWORKS:
        raise UsageError(f"no snippets for framework {framework!r}", remedy=f"use one of: {', '.join(FRAMEWORKS)}")
    parsed = Correction.parse(correction)
    kinds = sorted({group.module_kind for group in where})
    knob = knob_for(framework, parsed, kinds)
    if knob is not None:
        language, text, patterns = knob
        return Snippet(framework, language, _fill(text, {"patterns": patterns}))
    title = _comment(f"{sentence(correction_words(correction))} on {place(where)}.")
    note = (
        ""
        if framework in TORCH_FRAMEWORKS
        else f"# {framework} has no option for this; the same in plain PyTorch.\n{WHERE_TO_CALL.get(framework, '')}"
    )
    if parsed.kind in _TORCHAO:
        config = _torchao_config(parsed)
        if config:
            body = _fill(_TORCHAO_TEMPLATE, {"kinds": repr(tuple(kinds)), "config": config})
            return Snippet(framework, "python", f"{title}{note}{body}")
    if parsed.kind is CorrectionKind.KEEP_HIGH_PRECISION:
        body = _fill(_KEEP_TEMPLATE, {"kinds": repr(tuple(kinds))})
        return Snippet(framework, "python", f"{_comment(f'Keep {listed(kinds)} in high precision.')}{note}{body}")
    values = {
        "sides": "".join(f"    {kind!r}: {sides!r},\n" for kind, sides in _sides(where).items()),
        "quantized": repr("".join(side for side, on in (("x", emulated.x), ("w", emulated.w)) if on)),
        "rollout_only": repr(emulated.rollout_only),
        "corrected": _fill(_CORRECTED.get(parsed.kind, _BY_KERNEL), {"parameter": str(parsed.parameter or parsed)}),
    }
    return Snippet(framework, "python", f"{title}{note}{_fill(_TORCH_TEMPLATE, values)}")


def has_option(correction: str, framework: str) -> bool:
    """Whether the framework, or torchao under plain PyTorch, has an option for it; else it is emulated by hand."""
    parsed = Correction.parse(correction)
    if framework in TORCH_FRAMEWORKS:
        if parsed.kind is CorrectionKind.KEEP_HIGH_PRECISION:
            return True
        return parsed.kind in _TORCHAO and parsed.parameter is not Rule.FLOOR_DIV
    return knob_for(framework, parsed, ()) is not None


def _comment(text: str) -> str:
    return indent("\n".join(wrap(text, 110)), "# ") + "\n"


def _fill(text: str, values: Mapping[str, str]) -> str:
    return Template(text).substitute(values).strip() + "\n"


def _sides(where: Sequence[OperandGroup]) -> dict[str, str]:
    letters = {Role.X_FWD: "x", Role.W_FWD: "w"}
    sides: dict[str, str] = {}
    for group in where:
        sides[group.module_kind] = sides.get(group.module_kind, "") + letters.get(group.role, "")
    return sides


_TORCHAO = (CorrectionKind.RULE, CorrectionKind.NVFP4, CorrectionKind.MXFP8)
# `floor_div` is a bug's signature and never recommended; `oas` differs from `even` at an exact tie only.
_TORCHAO_MODES = {Rule.RCEIL: "RCEIL", Rule.FLOOR: "FLOOR", Rule.CEIL: "CEIL", Rule.EVEN: "EVEN", Rule.OAS: "EVEN"}


def _torchao_config(parsed: Correction) -> str:
    if parsed.kind is CorrectionKind.NVFP4:
        return "NVFP4FakeQuantizeConfig()"
    if parsed.kind is CorrectionKind.MXFP8:
        return "MXFakeQuantizeConfig(dtype=torch.float8_e4m3fn)"
    mode = _TORCHAO_MODES[Rule(str(parsed.parameter))]
    return f"MXFakeQuantizeConfig(scaling_mode=ScaleCalculationMode.{mode})"


_TORCHAO_TEMPLATE = """
# torchao >= 0.18, before the trainer is built; other modules keep what they have.
import torch
import torch.nn as nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig

KINDS = $kinds


def enable(model):
    config = $config
    quantize_(
        model,
        QATConfig(weight_config=config, activation_config=config, step="prepare"),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and name.endswith(KINDS),
    )
"""

_KEEP_TEMPLATE = """
# Where your code picks the modules to quantize (`filter_fn` of torchao's `quantize_`, or a loop), leave these out.
import torch.nn as nn

KEEP = $kinds


def is_quantized(module, name):
    return isinstance(module, nn.Linear) and not name.endswith((*KEEP, "lm_head"))
"""

_TORCH_TEMPLATE = '''
# Emulated in plain PyTorch, straight-through gradients. Call `enable(model)` before the trainer is built, and take
# your own fake quantization off these modules.
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

# Kind of module -> its corrected operands: x the input, w the weight.
SIDES = {
$sides}
QUANTIZED = $quantized  # operands that are MXFP4 in this run
ROLLOUT_ONLY = $rollout_only  # training forward stays in high precision


def mxfp4(x):
    """Round trip along the last axis: blocks of 32, power-of-two scales that never saturate (rceil), E2M1."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    scale = torch.ldexp(torch.ones_like(mantissa), (exponent - 3 + (mantissa > 0.75)).clamp(-126, 127))
    ratio = blocks / scale
    step = torch.where(ratio.abs() < 2, 0.5, torch.where(ratio.abs() < 4, 1.0, 2.0))
    rounded = (torch.round(ratio / step) * step).clamp(-6.0, 6.0) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


$corrected

class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantizer):
        return quantizer(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def enable(model):
    for name, module in model.named_modules():
        for kind, sides in SIDES.items():
            if isinstance(module, nn.Linear) and (name == kind or name.endswith("." + kind)):
                x_quantizer, w_quantizer = (
                    corrected if side in sides else mxfp4 if side in QUANTIZED else torch.clone for side in "xw"
                )
                module.forward = types.MethodType(_forward(x_quantizer, w_quantizer), module)


def _forward(x_quantizer, w_quantizer):
    def forward(self, x):
        if ROLLOUT_ONLY and torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        weight = StraightThrough.apply(self.weight, w_quantizer)
        return F.linear(StraightThrough.apply(x, x_quantizer), weight, self.bias)

    return forward
'''

_CORRECTED: dict[CorrectionKind, str] = {
    CorrectionKind.OUTLIER_FALLBACK: '''
def corrected(x):
    """Outlier fallback: a second pass quantizes what the first one lost."""
    first = mxfp4(x)
    return first + $parameter * mxfp4(x - first)
''',
    CorrectionKind.MACRO_BLOCK_SCALING: '''
def corrected(x):
    """Macro-block scaling: an 8-bit mantissa per $parameter elements moves their amax just under 6 * 2^k."""
    macro = F.pad(x.float(), (0, -x.shape[-1] % $parameter)).unflatten(-1, (-1, $parameter))
    amax = macro.abs().amax(-1, keepdim=True)
    ratio = torch.full_like(amax, 6.0) / torch.where(amax > 0, amax, 1.0)  # not a reciprocal: m8 would flip
    factor = 1.0 + ((ratio.view(torch.int32) & 0x7F8000) >> 15) / 256.0
    return (mxfp4((macro * factor).flatten(-2)).unflatten(-1, (-1, $parameter)) / factor).flatten(-2)[
        ..., : x.shape[-1]
    ].to(x.dtype)
''',
    CorrectionKind.HADAMARD: '''
def _rotation(size, device):
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    state, signs = 0x6D787072, []
    for _ in range(size):  # the random signs of mxprobe's what-if: its next trace then recognises this run
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        signs.append(1.0 if state >> 63 else -1.0)
    return h * torch.tensor(signs, device=device) / size**0.5


def corrected(x):
    """Random Hadamard rotation of $parameter: rotate, quantize, rotate back."""
    h = _rotation($parameter, x.device)
    groups = F.pad(x.float(), (0, -x.shape[-1] % $parameter)).unflatten(-1, (-1, $parameter))
    rotated = mxfp4((groups @ h.T).flatten(-2)).unflatten(-1, (-1, $parameter))
    return (rotated @ h).flatten(-2)[..., : x.shape[-1]].to(x.dtype)
''',
}

_BY_KERNEL = '''
def corrected(x):
    """$parameter, by the kernel that measured it: mxprobe must be installed where the job runs."""
    from mxprobe_kernels import apply_correction

    return apply_correction(x, "$parameter").to(x.dtype)
'''
