"""The statistics as an operator of torch: inside compiled graphs, into slots that are there before."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from mxprobe_kernels import Decomposition, accumulate, decompose, new_slots


class Probed(nn.Module):
    """A Linear whose input is measured, by a call and by a hook."""

    def __init__(self, slots: torch.Tensor):
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.slots = slots
        self.linear.register_forward_hook(lambda module, args, y: accumulate(y.detach(), slots, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accumulate(x.detach(), self.slots, 0, "mxfp4", "floor", 0)
        return self.linear(x).relu()


def test_it_is_part_of_a_whole_graph_and_of_its_backward():
    slots = new_slots(2)
    torch.manual_seed(0)
    plain = Probed(slots)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    x = torch.randn(40, 64)
    compiled(x).sum().backward()
    assert torch.equal(slots[0], decompose(x, rule="floor", dim=0).values)
    y = nn.functional.linear(x, plain.linear.weight, plain.linear.bias)
    assert torch.equal(slots[1], decompose(y).values)
    assert plain.linear.weight.grad is not None


def test_a_slot_adds_parts_and_keeps_the_larger_amax():
    slots = new_slots(3)
    parts = [torch.full((2, 32), 3.0), torch.full((2, 64), 7.0), torch.full((1, 32), 1.0)]
    for part in parts:
        accumulate(part, slots, 2)
    total = Decomposition(slots[2], "mxfp4", "rceil")
    assert total.to_dict() == (decompose(parts[0]) + decompose(parts[1]) + decompose(parts[2])).to_dict()
    assert total.amax == 7.0
    assert not slots[:2].any()


def test_torch_finds_the_operator_sound():
    """Schema, fake implementation and functionalization, by torch's own checks."""
    torch.library.opcheck(accumulate, (torch.randn(4, 64), new_slots(1), 0))


def test_slots_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"slots must be float64 \[n, 72\] on cpu; make them with new_slots"):
        accumulate(torch.ones(1, 32), torch.zeros(1, 72), 0)


def test_measuring_registers_nothing_with_torch():
    """The agent measures in a user's process, where what is registered stays."""
    program = (
        "import torch, mxprobe_kernels as k; k.decompose(torch.ones(1, 32)); k.lite(torch.ones(1, 32));"
        "print(hasattr(torch.ops.mxprobe, 'accumulate'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
