"""What each framework has an option for: the text that sets it, with `$patterns` where modules are named.

Read from their sources of autumn 2026; names drift, and a name that is gone is the framework's to say. What has no
entry here has no option: the snippet is PyTorch code then.
"""

from collections.abc import Sequence

from mxprobe_kernels.recipe_grammar import Correction, CorrectionKind

SAME_AS = {"slime": "megatron", "miles": "megatron", "transformer-engine": "megatron"}
"""Frameworks whose training runs through another's options."""
WHERE_TO_CALL = {
    "openrlhf": """\
# OpenRLHF: at the end of `openrlhf.models.Actor.__init__`, call `enable(self.model)`. Rollouts are vLLM's, which
# this code does not reach: on that side the correction takes an option of vLLM's.
""",
    "alto": """\
# ALTO: these modules must be in `ignore` of its LowPrecisionTrainingModifier, or they are quantized twice.
""",
}
"""Where the PyTorch code goes, as comment lines."""
MACRO_BLOCK_OF = {"alto": 128}
"""Elements under one mantissa, where a framework has macro-block scaling of one size."""


def knob_for(framework: str, correction: Correction, kinds: Sequence[str]) -> tuple[str, str, str] | None:
    """(language, text, patterns to fill in) of a framework's option for these kinds of module; None without one."""
    framework = SAME_AS.get(framework, framework)
    knob = _KNOBS.get((framework, correction.kind))
    if knob is None:
        return None
    size = MACRO_BLOCK_OF.get(framework)
    if correction.kind is CorrectionKind.MACRO_BLOCK_SCALING and correction.parameter != size:
        return None
    return (*knob, _patterns(framework, kinds))


def _patterns(framework: str, kinds: Sequence[str]) -> str:
    if framework in ("verl", "alto"):
        return ", ".join(f'"re:.*{kind}$"' for kind in kinds)
    if framework == "megatron":
        return "\n".join(
            f'  keep_{index}: {{type: glob, enabled: true, pattern: "*.{kind}", config: bf16}}'
            for index, kind in enumerate(kinds)
        )
    return ", ".join(f'"*{kind}*"' for kind in kinds)


_ALTO = "# ALTO: these keys of LowPrecisionTrainingModifier in your recipe file; the others stay as they are.\n"

_KNOBS: dict[tuple[str, CorrectionKind], tuple[str, str]] = {
    ("verl", CorrectionKind.NVFP4): (
        "yaml",
        """
# verl (FSDP): NVFP4 weights in place of MXFP4; activations stay in BF16 (its w4a4 is marked experimental).
actor_rollout_ref:
  actor: {fsdp_config: {qat: {enable: true, mode: w4a16, group_size: 16, ignore_patterns: [lm_head]}}}
""",
    ),
    ("verl", CorrectionKind.KEEP_HIGH_PRECISION): (
        "yaml",
        """
# verl (FSDP): leave these modules out of quantization; regular expressions (Megatron takes fnmatch instead).
actor_rollout_ref:
  actor: {fsdp_config: {qat: {enable: true, ignore_patterns: [lm_head, $patterns]}}}
""",
    ),
    ("nemo-rl", CorrectionKind.NVFP4): (
        "yaml",
        """
# NeMo-RL: NVFP4 (ModelOpt) in trainer and rollout.
policy:
  quant_cfg: examples/modelopt/quant_configs/nvfp4_a16.yaml
  generation: {quant_cfg: examples/modelopt/quant_configs/nvfp4_a16.yaml, real_quant: true}
""",
    ),
    ("nemo-rl", CorrectionKind.KEEP_HIGH_PRECISION): (
        "yaml",
        """
# NeMo-RL: leave these modules out of quantization in the rollout.
policy:
  generation: {real_quant_ignore: [lm_head, $patterns]}
""",
    ),
    ("megatron", CorrectionKind.NVFP4): (
        "bash",
        """
# Megatron with TransformerEngine (slime, miles): NVFP4 in place of MXFP4.
--fp4-format e2m1 --fp4-recipe nvfp4
""",
    ),
    ("megatron", CorrectionKind.MXFP8): (
        "bash",
        """
# Megatron with TransformerEngine (slime, miles): MXFP8 in place of MXFP4.
--fp8-format e4m3 --fp8-recipe mxfp8
""",
    ),
    ("megatron", CorrectionKind.NVFP4_4OVER6): (
        "bash",
        """
# Megatron with TransformerEngine (slime, miles): NVFP4 with Four-over-Six by squared error, here and in the rollout.
export NVTE_NVFP4_4OVER6=all NVTE_NVFP4_4OVER6_ERR_MODE=MSE FLASHINFER_NVFP4_4OVER6=1
--fp4-format e2m1 --fp4-recipe nvfp4
""",
    ),
    ("megatron", CorrectionKind.KEEP_HIGH_PRECISION): (
        "yaml",
        """
# Megatron with TransformerEngine: --te-precision-config-file with this file, names as Megatron has them. In miles
# the rollout too: --extra-high-precision-layers-megatron, --extra-high-precision-layers-hf (parts of names).
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
matchers:
$patterns
""",
    ),
    ("alto", CorrectionKind.MACRO_BLOCK_SCALING): (
        "yaml",
        _ALTO
        + """training_stage:
  lpt_modifiers:
    LowPrecisionTrainingModifier: {scheme: mxfp4, two_level_scaling: blockwise}
""",
    ),
    ("alto", CorrectionKind.NVFP4): (
        "yaml",
        _ALTO
        + """# Start with TRITON_ALLOW_NON_CONSTEXPR_GLOBALS=1, which its NVFP4 kernels need.
training_stage:
  lpt_modifiers:
    LowPrecisionTrainingModifier: {scheme: nvfp4, two_level_scaling: tensorwise, clip_mode: none}
""",
    ),
    ("alto", CorrectionKind.MXFP8): (
        "yaml",
        _ALTO
        + """training_stage:
  lpt_modifiers:
    LowPrecisionTrainingModifier:
      {scheme: mxfp8_e4m3, two_level_scaling: none, use_hadamard: false, use_sr_grad: false}
""",
    ),
    ("alto", CorrectionKind.KEEP_HIGH_PRECISION): (
        "yaml",
        _ALTO
        + """training_stage:
  lpt_modifiers:
    LowPrecisionTrainingModifier: {ignore: ["output", $patterns]}
""",
    ),
}
