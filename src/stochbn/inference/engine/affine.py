"""A drawn layer is an affine map of each channel, γ (x − μ) / sqrt(σ² + ε) + β: of one draw, or of S at once."""

from typing import Any

import torch
from torch import Tensor

from stochbn.statistics.normalization import BatchNormCall, widen

Affine = tuple[Tensor, Tensor | None]


def fold(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Makes BatchNorm with given statistics one scale and one shift a channel, in float32 or better.

    Shape:
        Statistics (*, C), parameters (C,) → scale and shift (*, C).

    Examples:
        >>> scale, shift = fold(torch.tensor([3.0]), torch.tensor([4.0]), None, None, eps=0.0)
        >>> scale * 7 + shift
        tensor([2.])
    """
    mean, var = widen(mean), widen(var)
    scale = (var + eps).rsqrt() * (1.0 if weight is None else weight)
    return scale, -mean * scale + (0.0 if bias is None else bias)


def own_moments(x: Tensor, num_inputs: int) -> Tensor:
    """Returns mean and variance of the values that each input has in a channel, in float32 or better.

    Shape:
        (N · T, C, *), since a model may fold T parts of an input into the batch → (2, N, C).
    """
    if x.shape[0] % num_inputs:
        raise ValueError(
            f"Expected a BatchNorm layer to get a multiple of {num_inputs} inputs, one or more rows each, got "
            f"{x.shape[0]}: the model regroups its batch. Fit with conditioned=False."
        )
    parts = widen(x).unflatten(0, (num_inputs, -1))  # (N, T, C, *)
    var, mean = torch.var_mean(parts, (1, *range(3, parts.dim())), correction=0)
    return torch.stack([mean, var])


def condition(own: Tensor, call: BatchNormCall, share: Tensor) -> tuple[Tensor, Tensor]:
    """Folds for each input the statistics of a mini-batch of which it is one: partly given, partly its own.

    Eq. 2 has x in its batch B, of which it is the part w = 1 / M. With x̄ and v the mean and variance of the input's own
    values in a channel, μ(B) is (1 − w) μ + w x̄; the second moment likewise, which gives
    σ²(B) = (1 − w) (σ² + w (x̄ − μ)²) + w v.

    Args:
        own: x̄ and v, (2, N, C); (2, S, N, C) where draws differ.
        call: With the statistics μ and σ² of a mini-batch as `running_mean` and `running_var`, (C,) or (S, 1, C).
        share: w, () or (S, 1, 1).

    Returns:
        Scale and shift, (N, C) or (S, N, C).

    Examples:
        >>> x = torch.tensor([[[1.0, 5.0]]])
        >>> call = BatchNormCall(x, torch.tensor([0.0]), torch.tensor([1.0]), eps=0.0)
        >>> scale, shift = condition(own_moments(x, 1), call, torch.tensor(0.5))
        >>> torch.allclose(x * scale + shift, (x - 1.5) / (0.5 * (1 + 3**2 / 2 + 4)) ** 0.5)
        True
    """
    own_mean, own_var = own
    mean, var, share = call.running_mean, call.running_var, share.to(own_mean.dtype)
    assert mean is not None
    assert var is not None
    distance = own_mean - mean
    mixed_var = (1 - share) * (var + share * distance.square()) + share * own_var
    return fold(mean + share * distance, mixed_var, call.weight, call.bias, call.eps)


def normalise_with(call: BatchNormCall, share: Tensor | None, num_inputs: int) -> Tensor:
    """Normalises (N · T, C, *) by the statistics of one draw; with a share, by mini-batches that the input is in."""
    x = call.input
    assert call.running_mean is not None
    assert call.running_var is not None
    if share is None:
        scale, shift = fold(call.running_mean, call.running_var, call.weight, call.bias, call.eps)
    else:
        maps = condition(own_moments(x, num_inputs), call, share)
        scale, shift = (values.repeat_interleave(x.shape[0] // num_inputs, 0) for values in maps)
    scale, shift = (values.view(-1, x.shape[1], *(1 for _ in x.shape[2:])) for values in (scale, shift))
    return torch.addcmul(shift, x, scale).to(x.dtype)


def apply_to_rows(x: Tensor, scale: Tensor, shift: Tensor | None, *, num_draws: int, is_drawn: bool) -> Tensor:
    """Applies a map of each draw to the rows of all draws, which lie one draw after the other.

    Args:
        x: (S · R, C, *), or (R, C, *) if the draws have the same.
        scale: (S, 1, C, *) with ones for `*`; or (S, R, C, *).
        shift: Like it; None for 0.
        num_draws: S.
        is_drawn: Whether x has rows for every draw.

    Returns:
        (S · R, C, *), in x's dtype.
    """
    x = x.unflatten(0, (num_draws, -1)) if is_drawn else x.unsqueeze(0)
    output: Tensor = x * scale if shift is None else torch.addcmul(shift, x, scale)
    return output.to(x.dtype).flatten(0, 1)


def pool_before(x: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    """Pools what a BatchNorm layer will normalise: by maximum, or by minimum in channels that γ < 0 turns around.

    Args:
        x: (R, C, H, W).
        weight: γ, (C,), or None.
        options: Of `max_pool2d`.
    """
    sign: Any = 1 if weight is None else weight.sign().to(x.dtype).view(-1, 1, 1)
    pooled: Tensor = torch.ops.aten.max_pool2d.default(x * sign, *options) * sign
    return pooled


def repeat_rows(x: Tensor, num_draws: int) -> Tensor:
    """Gives every draw the rows of a shared value: (N, *) → (S · N, *)."""
    return x.expand(num_draws, *x.shape).flatten(0, 1)


def add_to_rows(x: Tensor, other: Tensor, *, num_draws: int) -> Tensor:
    """Adds what all draws have in common to the rows of each: (S · R, *) + (R, *), without repeating it."""
    output: Tensor = x.unflatten(0, (num_draws, -1)) + other  # (S, R, *)
    return output.flatten(0, 1)


def fold_single(
    mean: Tensor, var: Tensor, share: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Folds statistics for inputs that have one value a channel and are counted into their mini-batch.

    There x̄ = x and v = 0, so that with d = x − μ a layer returns γ (1 − w) d / sqrt((1 − w) (σ² + w d²) + ε) + β. That
    is a · u / sqrt(1 + u²) + β, where u = c d, and a and c do not depend on the input.

    Args:
        mean: μ, (S, C).
        var: σ², (S, C).
        share: w, (S,).
        weight: γ, (C,), or None.
        bias: β, (C,), or None.
        eps: ε.

    Returns:
        c, −c μ and a, (S, 1, C) each, and β.
    """
    mean, var = widen(mean)[:, None], widen(var)[:, None]
    share = share.to(mean.dtype)[:, None, None].clamp_min(1e-20)  # as good as none, and has a square root
    scale = ((1 - share) * share / ((1 - share) * var + eps)).sqrt()
    slope = ((1 - share) / share).sqrt() * (torch.ones_like(mean) if weight is None else weight)
    return scale, -mean * scale, slope, bias


def squash_rows(
    x: Tensor, scale: Tensor, shift: Tensor, slope: Tensor, bias: Tensor | None, *, num_draws: int, is_drawn: bool
) -> Tensor:
    """Applies what `fold_single` returned to the rows of all draws, in few operations, as each reads all values.

    Shape:
        (S · N, C), or (N, C) if the draws have the same → (S · N, C).
    """
    u = torch.addcmul(shift, widen(x.unflatten(0, (num_draws if is_drawn else 1, -1))), scale)  # (S, N, C)
    output = u.square().add_(1).rsqrt_().mul_(u)
    output = output.mul_(slope) if bias is None else torch.addcmul(bias, output, slope)
    return output.to(x.dtype).flatten(0, 1)


def condition_rows(
    x: Tensor,
    own: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    num_draws: int,
    num_inputs: int,
    is_drawn: bool,
) -> Tensor:
    """Normalises the rows of all draws, each input by mini-batches of which it is one.

    Args:
        x: (S · N · T, C, *), or (N · T, C, *) if the draws have the same.
        own: What `own_moments` returns of x.
        mean: (S, 1, C), like `var`.
        var: Of the mini-batches.
        share: (S, 1, 1).
        weight: γ, (C,), or None.
        bias: β, (C,), or None.
        eps: ε.
        num_draws: S.
        num_inputs: N.
        is_drawn: Whether x has rows for every draw.
    """
    num_stacked = num_draws if is_drawn else 1
    own = own.unflatten(1, (num_stacked, -1))
    parts = x.shape[0] // (num_stacked * num_inputs)
    maps = [  # (S, N, C) → (S, N · T, C, *)
        (values if parts == 1 else values.repeat_interleave(parts, 1)).view(
            num_draws, -1, x.shape[1], *(1 for _ in x.shape[2:])
        )
        for values in condition(own, BatchNormCall(x, mean, var, weight, bias, eps=eps), share)
    ]
    return apply_to_rows(x, *maps, num_draws=num_draws, is_drawn=is_drawn)
