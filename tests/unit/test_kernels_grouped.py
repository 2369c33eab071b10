"""Statistics by expert are those of each expert's rows alone, on every CPU backend."""

import itertools

import pytest
import torch

from mxprobe_kernels import cpu_backend, decompose, decompose_grouped, torch_backend
from mxprobe_kernels.formats import FORMATS, Rule
from tests.cases import disagreements

BACKENDS = ["torch", *(["cpu"] if cpu_backend.isas() else [])]
OFFSETS = torch.tensor([2, 2, 3, 40, 40, 100, 149])
"""Empty experts, one of a single token, padding before the first and after the last."""


@pytest.fixture
def x() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(150, 70, generator=g) * torch.exp2(torch.randint(-9, 9, (150, 1), generator=g))
    x[20, 3], x[50] = torch.nan, 0
    return x


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("format", [f for f in FORMATS.values() if f.block_rows == 1], ids=lambda f: f.name)
def test_an_expert_is_measured_by_itself(x: torch.Tensor, format, dim: int):
    for backend in BACKENDS:
        grouped = decompose_grouped(x, OFFSETS, format=format, dim=dim, backend=backend)
        for e, (first, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
            expected = torch_backend.decompose(x[first:end], format, Rule.RCEIL, dim).to_dict()
            rtol = 1e-12 if backend == "torch" else 1e-6
            assert disagreements(grouped.expert(e).to_dict(), expected, rtol) == []


@pytest.mark.parametrize("dim", [-1, 0])
def test_tiles_cut_experts_anywhere(x: torch.Tensor, dim: int, monkeypatch: pytest.MonkeyPatch):
    from mxprobe_kernels import torch_grouped

    whole = decompose_grouped(x, OFFSETS, dim=dim, backend="torch")
    monkeypatch.setattr(torch_grouped, "CPU_TILE_ELEMENTS", 32 * 70 * 2)
    parts = decompose_grouped(x, OFFSETS, dim=dim, backend="torch")
    assert torch.allclose(whole.values, parts.values, rtol=1e-12, atol=0)


def test_experts_add_up_to_the_tensor(x: torch.Tensor):
    offsets = torch.tensor([0, 50, 50, 150], dtype=torch.int32)
    total = decompose_grouped(x, offsets).total()
    assert disagreements(total.to_dict(), decompose(x).to_dict(), rtol=1e-6) == []
    assert decompose_grouped(x[:0], torch.tensor([0, 0])).values.count_nonzero() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(2, 2, 2), OFFSETS), "a matrix of tokens by features"),
        ((torch.ones(2, 2), torch.tensor([0.0, 2.0])), "offsets must be int32 or int64"),
        ((torch.ones(2, 2), OFFSETS.to("meta")), "offsets must be on cpu, as x is, not on meta"),
    ],
)
def test_what_does_not_fit_is_answered_in_words(arguments: tuple[torch.Tensor, torch.Tensor], words: str):
    with pytest.raises(ValueError, match=words):
        decompose_grouped(*arguments)
    with pytest.raises(ValueError, match="square blocks"):
        decompose_grouped(torch.ones(2, 2), torch.tensor([0, 2]), format="fp8_square")
