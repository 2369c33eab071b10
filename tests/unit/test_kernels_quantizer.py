"""The C++ quantizer against the float64 torch path: every bit of Q and every exponent."""

import pytest
import torch

from mxprobe_kernels import cpu_backend, cpu_quantizer, quantize_dequantize, torch_backend
from mxprobe_kernels.blocks import from_blocks, per_block, to_blocks
from mxprobe_kernels.formats import FORMATS, HIF4, MXFP4, MXFP4_4OVER6, NVFP4, Format, Rule
from mxprobe_kernels.quantizer import quantized
from tests.cases import golden_cases, hard_tensors, same_bits

built = pytest.mark.skipif(cpu_backend.library() is None, reason="no compiler when mxprobe was installed")
ISAS = cpu_backend.isas() or ("none",)


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_same_bits_as_the_torch_path(format: Format, isa: str):
    tensors = [*hard_tensors(), *((case.name, case.x) for case in golden_cases())]
    for name, x in tensors:
        blocks, _ = to_blocks(x, -1, format.block, format.block_rows)
        tensor_amax = torch_backend.finite_amax(blocks) if format.tensor_scale else None
        for rule in Rule if format == MXFP4 else (Rule.RCEIL, Rule.FLOOR):
            q, scales = torch_backend.quantized_blocks(blocks, format, rule)
            for dtype in (torch.float32, torch.float64):
                found, exponents = cpu_quantizer.quantize(blocks, format, rule, tensor_amax, dtype, isa=isa)
                assert same_bits(found.double().numpy(), q.to(dtype).double().numpy()), (name, rule)
                assert torch.equal(exponents, scales.exponent), (name, rule)


@pytest.mark.parametrize("format", [MXFP4, NVFP4, MXFP4_4OVER6, HIF4], ids=lambda f: f.name)
def test_the_public_function_is_the_torch_path_to_the_bit(format: Format):
    for _, x in hard_tensors():
        for dim in (0, 1):
            q, exponents = quantize_dequantize(x, format=format, dim=dim)
            blocks, shape = to_blocks(x, dim, format.block, format.block_rows)
            blocks_q, scales = torch_backend.quantized_blocks(blocks, format, Rule.RCEIL)
            expected = from_blocks(blocks_q.to(x.dtype), shape)
            expected_exponents = per_block(scales.exponent.squeeze(-1), shape)
            assert q.dtype == x.dtype
            assert same_bits(q.double().numpy(), expected.double().numpy())
            assert torch.equal(exponents, expected_exponents)


def test_a_compiled_graph_holds_the_torch_operations():
    """The library is no part of a graph: nothing breaks it, and the values are the same."""
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda t: quantized(t, MXFP4, Rule.RCEIL)[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), quantized(x, MXFP4, Rule.RCEIL)[0])


@built
def test_what_the_library_cannot_take_is_answered_in_words():
    blocks = torch.ones(1, 1, 64, device="meta")
    with pytest.raises(ValueError, match="cannot quantize this tensor to hif4; use the torch path"):
        cpu_quantizer.quantize(blocks, HIF4, Rule.RCEIL, None, torch.float32)
    with pytest.raises(ValueError, match="no quantizer for instruction set 'mmx'"):
        cpu_quantizer.quantize(torch.ones(1, 1, 32), MXFP4, Rule.RCEIL, None, torch.float32, isa="mmx")
