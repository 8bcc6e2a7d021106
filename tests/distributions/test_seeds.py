"""Streams of random numbers are functions of what they are for."""

import torch

from stochbn.distributions.seeds import antithetic_normal, derive_seed, member_seed


def test_seeds_differ_in_every_part_and_are_stable() -> None:
    seeds = {derive_seed(seed, what, index) for seed in (0, 1) for what in ("draw", "pair") for index in range(50)}
    assert len(seeds) == 200
    assert derive_seed(0, "pair", 0) == derive_seed(0, "pair", 0)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_first_member_has_the_seed_itself() -> None:
    assert member_seed(7, 0) == 7
    assert len({member_seed(7, member) for member in range(20)}) == 20


def test_noise_is_standard_normal_and_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    noise = antithetic_normal(seed=3, first=0, count=400, size=100)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(noise[::2], -noise[1::2])
    independent = noise[::2]  # 20,000 numbers: five standard errors of the mean and of the variance
    assert independent.mean().abs() < 5 / 20_000**0.5
    assert (independent.var() - 1).abs() < 5 * (2 / 20_000) ** 0.5
