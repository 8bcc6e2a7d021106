"""One seed → independent streams, a function of what they are for."""

import hashlib

import torch


def derive_seed(*parts: object) -> int:
    """Returns a 64-bit seed that depends on all the parts, and on nothing else.

    Example:
        >>> derive_seed(0, "draw", 1) == derive_seed(0, "draw", 1) != derive_seed(0, "draw", 2)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def member_seed(seed: int, member: int) -> int:
    """Returns the seed of an ensemble's member: the first has the seed itself, so an ensemble of one is that model."""
    return seed if member == 0 else derive_seed(seed, "member", member)


def standard_normal(seed: int, draw: int, size: int) -> torch.Tensor:
    """Returns the Gaussian noise of one draw, on the CPU, in float64: (size,)."""
    generator = torch.Generator("cpu").manual_seed(derive_seed(seed, "draw", draw))
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")


def random_seed() -> int:
    """Takes a seed from torch's own generator."""
    return int(torch.randint(2**31, (), device="cpu"))
