import pytest
import torch

from mxprobe.measuring.sampling import CERTAIN_SHARE, TILE, row_norms, sample_singles, sample_tiles, seed_of, take


def test_everything_is_taken_where_it_fits():
    assert sample_tiles(512, 512, seed=0, device=torch.device("cpu")) is None
    assert sample_tiles(20, 1, seed=0, device=torch.device("cpu")) is None


def test_a_sample_is_whole_aligned_tiles_without_repetition():
    index = sample_tiles(1000, 256, seed=3, device=torch.device("cpu"))
    assert index is not None
    assert index.shape == (256,)
    tiles = index.reshape(-1, TILE)
    assert torch.equal(tiles[:, 0] % TILE, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(tiles - tiles[:, :1], torch.arange(TILE).expand(8, TILE))
    assert len(set(index.tolist())) == 256
    assert index.max() < 1000 // TILE * TILE


def test_every_tile_is_drawn_equally_often():
    counts = torch.zeros(8)
    for seed in range(800):
        index = sample_tiles(256, 64, seed=seed, device=torch.device("cpu"))
        assert index is not None
        counts[index[::TILE] // TILE] += 1
    assert counts.min() > 150
    assert counts.max() < 250


def test_seeds_depend_on_step_and_module_and_not_on_the_process():
    assert seed_of(1, "a") == 0xE8B7BE43 << 20 ^ 1
    assert len({seed_of(step, name) for step in range(50) for name in "abcd"}) == 200


def test_sampling_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    sample_tiles(4096, 64, seed=1, device=torch.device("cpu"))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_taken_tensor_does_not_follow_the_original():
    x = torch.ones(4, 2, requires_grad=True)
    copied = take(x, None)
    with torch.no_grad():
        x.zero_()
    assert torch.equal(copied, torch.ones(4, 2))
    assert not copied.requires_grad


N, LIMIT = 512, 64


def heavy_rows() -> torch.Tensor:
    """[N, 32]: the norms of rows vary by a few powers of ten."""
    generator = torch.Generator().manual_seed(0)
    scale = (1.5 * torch.randn(N, 1, generator=generator)).exp()
    return torch.randn(N, 32, generator=generator) * scale


def test_few_rows_are_all_taken():
    assert sample_singles(torch.ones(LIMIT), LIMIT, seed=0) is None


def test_the_largest_rows_are_always_in_and_stand_for_themselves():
    norms = row_norms(heavy_rows())
    rows = sample_singles(norms, LIMIT, seed=1)
    assert rows is not None
    assert rows.n_certain == LIMIT // CERTAIN_SHARE
    assert set(rows.index[-rows.n_certain :].tolist()) == set(norms.topk(rows.n_certain).indices.tolist())
    assert rows.weights()[-rows.n_certain :].unique().tolist() == [1.0]
    assert len(set(rows.index.tolist())) == LIMIT
    assert float(rows.weights().sum()) == N


def test_a_row_that_is_not_a_number_is_one_of_the_largest():
    norms = torch.ones(N)
    norms[17] = float("nan")
    rows = sample_singles(norms, LIMIT, seed=2)
    assert rows is not None
    assert 17 in rows.index[-rows.n_certain :]


def test_norms_of_half_precision_do_not_overflow():
    assert row_norms(torch.full((1, 64), 6e4, dtype=torch.float16)).item() == pytest.approx(48e4)


def errors(values: torch.Tensor, norms: torch.Tensor, *, certain: bool, n_draws: int = 400) -> torch.Tensor:
    """Relative errors of the estimated sum of `values`, one for each draw."""
    estimates: list[torch.Tensor] = []
    for seed in range(n_draws):
        if certain:
            rows = sample_singles(norms, LIMIT, seed=seed)
            assert rows is not None
            estimates.append(values[rows.index] @ rows.weights())
        else:
            index = torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:LIMIT]
            estimates.append(values[index].sum() * N / LIMIT)
    return torch.stack(estimates) / values.sum() - 1


def test_weighted_sums_are_unbiased_and_vary_less_where_rows_are_heavy_tailed():
    x = heavy_rows().double()
    energies, norms = x.square().sum(1), row_norms(x)
    certain, by_lot = (errors(energies, norms, certain=which) for which in (True, False))
    assert abs(float(certain.mean())) < 4 * float(certain.std()) / len(certain) ** 0.5
    assert float(certain.std()) < 0.1 * float(by_lot.std())


def test_single_rows_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    sample_singles(torch.rand(N, generator=torch.Generator()), LIMIT, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
