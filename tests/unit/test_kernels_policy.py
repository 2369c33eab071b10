"""Log-probabilities, entropies and divergences from logits, against distributions of torch in float64."""

import pytest
import torch

from mxprobe_kernels import exact_kl, token_statistics


def logits(n: int = 7, V: int = 33, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(n, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_token_statistics(dtype: torch.dtype):
    z, tokens = logits().to(dtype), torch.arange(7) * 4
    truth = torch.distributions.Categorical(logits=z.double() / 0.7)
    found = token_statistics(z, tokens, 0.7)
    assert torch.allclose(found.log_prob.double(), truth.log_prob(tokens), atol=1e-5)
    assert torch.allclose(found.entropy.double(), truth.entropy(), atol=1e-5)


def test_chunks_change_no_bit():
    z, tokens = logits(100), torch.randint(33, (100,), generator=torch.Generator().manual_seed(1))
    whole, chunked = token_statistics(z, tokens), token_statistics(z, tokens, chunk_elements=200)
    assert torch.equal(whole.log_prob, chunked.log_prob)
    assert torch.equal(whole.entropy, chunked.entropy)
    assert torch.equal(
        exact_kl(z, z + 1e-3 * logits(100, seed=2)), exact_kl(z, z + 1e-3 * logits(100, seed=2), chunk_elements=70)
    )


def test_a_masked_token_has_entropy_zero_and_no_part_in_the_divergence():
    z = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert token_statistics(z, torch.tensor([0])).entropy.item() == pytest.approx(0.6931472)
    assert exact_kl(z, torch.tensor([[0.0, 0.0, 0.0]])).item() == pytest.approx(0.4054651, abs=1e-7)


def test_exact_kl_is_that_of_the_distributions_down_to_tiny_differences():
    p, q = logits(), logits() + 1e-4 * logits(seed=3)
    truth = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    )
    assert 0 < truth.max() < 1e-5
    assert torch.allclose(exact_kl(p, q), truth, rtol=1e-6, atol=0)
    assert torch.equal(exact_kl(p, p), torch.zeros(7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be \[n, V\] alike"):
        exact_kl(p, q[:3])
