"""One seed → independent streams, a function of what they are for."""

import hashlib

import torch


def derive_seed(*parts: object) -> int:
    """Returns a 64-bit seed that depends on all the parts, and on nothing else.

    Examples:
        >>> derive_seed(0, "draw", 1) == derive_seed(0, "draw", 1) != derive_seed(0, "draw", 2)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def member_seed(seed: int, member: int) -> int:
    """Returns the seed of an ensemble's member: the first has the seed itself, so an ensemble of one is that model."""
    return seed if member == 0 else derive_seed(seed, "member", member)


def antithetic_normal(seed: int, first: int, count: int, size: int) -> torch.Tensor:
    """Returns the Gaussian noise of successive draws, on the CPU: (count, size), float64.

    Draw 2i + 1 is the mirror image of draw 2i, so that in the mean over both all that is odd in the noise cancels, the
    linear part above all. Pairs are independent of each other; so are the draws of even number.

    Examples:
        >>> noise = antithetic_normal(seed=0, first=0, count=4, size=3)
        >>> torch.equal(noise[0], -noise[1])
        True
        >>> torch.equal(antithetic_normal(seed=0, first=3, count=1, size=3), noise[3:])
        True
    """
    pairs = range(first // 2, (first + count + 1) // 2)
    noise = torch.empty(len(pairs), size, device="cpu", dtype=torch.float32)  # several times faster than float64
    generator = torch.Generator("cpu")
    for row, pair in zip(noise, pairs, strict=True):
        row.normal_(generator=generator.manual_seed(derive_seed(seed, "pair", pair)))
    both = torch.stack([noise, -noise], dim=1).flatten(0, 1).double()
    return both[first % 2 : first % 2 + count]


def random_seed() -> int:
    """Takes a seed from torch's own generator."""
    return int(torch.randint(2**31, (), device="cpu"))
