import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from mxprobe.measuring.operands.weights import effective_weight, sample_weight


class DropWeight(nn.Module):
    """A parametrization that draws from the global generator at every read."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (torch.rand_like(weight) > 0.5)


def test_a_plain_weight_is_read_as_it_is():
    module = nn.Linear(8, 4)
    assert effective_weight(module) is module.weight


def test_a_parametrized_weight_is_what_the_module_multiplies_by():
    module = parametrizations.weight_norm(nn.Linear(8, 4))
    assert torch.equal(effective_weight(module), module.weight)


def test_reading_advances_no_state_of_a_parametrization():
    module = parametrizations.spectral_norm(nn.Linear(8, 4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    effective_weight(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    module.weight  # noqa: B018  a read by the model does advance it, which is why ours must not
    assert not all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_reading_draws_nothing_from_the_global_generator():
    module = nn.Linear(8, 4)
    parametrize.register_parametrization(module, "weight", DropWeight())
    before = torch.random.get_rng_state()
    effective_weight(module)
    assert torch.equal(before, torch.random.get_rng_state())


def test_small_weights_are_copied_once_and_whole():
    module = nn.Linear(64, 32)
    sample = sample_weight(module, max_features=64, seed=0)
    assert sample is not None
    assert sample.rows is sample.columns
    assert torch.equal(sample.rows, module.weight)
    with torch.no_grad():
        module.weight.zero_()
    assert sample.rows.abs().sum() > 0


def test_a_weight_that_is_no_plain_tensor_is_left_alone():
    class Wrapped(torch.Tensor):
        pass

    module = nn.Linear(8, 4, bias=False)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Wrapped))
    assert sample_weight(module, max_features=64, seed=0) is None
