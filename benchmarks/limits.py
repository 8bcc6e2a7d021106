"""The physical limit: the rate of a large matrix product on this machine, and the operations that draws need.

FLOPs are those of `torch.utils.flop_counter`: two for each multiply-add of convolutions and linear layers, none for
normalisation, activations and pooling. What stands in front of the first BatchNorm layer is the same in all draws and
counts once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import seconds
from stochbn.statistics.layers import all_batch_norms

GEMM_SIZES = (1024, 2048, 3072)


@torch.inference_mode()
def gemm_rate(repeats: int = 5, sizes: Sequence[int] = GEMM_SIZES) -> float:
    """Returns FLOP/s of float32 products of square matrices, the best of all."""
    best = 0.0
    for size in sizes:
        a, b = torch.randn(size, size), torch.randn(size, size)
        out = torch.mm(a, b)
        best = max(best, 2 * size**3 / min(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats)))  # noqa: B023
    return best


@torch.no_grad()
def count_flops(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Counts the FLOPs of a pass, and of the part of it that all draws share."""
    counter = FlopCounterMode(display=False)
    before: list[int] = []
    hooks = [
        norm.register_forward_pre_hook(lambda *_: before.append(counter.get_total_flops()))
        for norm in all_batch_norms(model).values()
    ]
    try:
        with counter:
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops(), min(before)


def needed_flops(whole: int, shared: int, num_draws: int) -> int:
    """Returns the FLOPs that so many draws cannot do without."""
    return shared + num_draws * (whole - shared)
