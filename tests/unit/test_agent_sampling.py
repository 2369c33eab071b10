import torch

from mxprobe.agent.sampling import TILE, sample_tiles, seed_of, take


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
