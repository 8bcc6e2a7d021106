"""A drawn layer is an affine map of each channel, γ (x − μ) / sqrt(σ² + ε) + β: of one draw, or of S at once."""

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


def own_moments(x: Tensor, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of the values that each input has in a channel, in float32 or better.

    Shape:
        (N · T, C, *), since a model may fold T parts of an input into the batch → (N, C) each.
    """
    if x.shape[0] % num_inputs:
        raise ValueError(
            f"Expected a BatchNorm layer to get a multiple of {num_inputs} inputs, one or more rows each, got "
            f"{x.shape[0]}: the model regroups its batch. Fit with conditioned=False."
        )
    parts = widen(x).unflatten(0, (num_inputs, -1))  # (N, T, C, *)
    var, mean = torch.var_mean(parts, (1, *range(3, parts.dim())), correction=0)
    return mean, var


def condition(own: tuple[Tensor, Tensor], call: BatchNormCall, share: Tensor) -> tuple[Tensor, Tensor]:
    """Folds for each input the statistics of a mini-batch of which it is one: partly given, partly its own.

    Eq. 2 has x in its batch B, of which it is the part w = 1 / M. With x̄ and v the mean and variance of the input's own
    values in a channel, μ(B) is (1 − w) μ + w x̄; the second moment likewise, which gives
    σ²(B) = (1 − w) (σ² + w (x̄ − μ)²) + w v.

    Args:
        own: x̄ and v, (N, C); with a leading axis where draws differ.
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


def repeat_rows(x: Tensor, num_draws: int) -> Tensor:
    """Gives every draw the rows of a shared value: (N, *) → (S · N, *)."""
    return x.expand(num_draws, *x.shape).flatten(0, 1)


def add_to_rows(x: Tensor, other: Tensor, *, num_draws: int) -> Tensor:
    """Adds what all draws have in common to the rows of each: (S · R, *) + (R, *), without repeating it."""
    output: Tensor = x.unflatten(0, (num_draws, -1)) + other  # (S, R, *)
    return output.flatten(0, 1)


def condition_rows(
    x: Tensor,
    own_mean: Tensor | None,
    own_var: Tensor | None,
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
        own_mean: What `own_moments` returns of x; None where an input has one value a channel.
        own_var: Like it.
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
    if own_mean is None or own_var is None:
        # x̄ = x and v = 0: γ (1 − w) d / sqrt((1 − w) (σ² + w d²) + ε) + β, in few operations, as each reads all values.
        distance = widen(x.unflatten(0, (num_stacked, -1))) - mean  # (S, N, C)
        rest = 1 - share.to(distance.dtype)
        output = torch.addcmul(rest * var + eps, distance * (rest * share), distance).rsqrt_().mul_(distance)
        output.mul_(rest if weight is None else rest * weight)
        return (output if bias is None else output.add_(bias)).to(x.dtype).flatten(0, 1)
    own = (own_mean.unflatten(0, (num_stacked, -1)), own_var.unflatten(0, (num_stacked, -1)))
    parts = x.shape[0] // (num_stacked * num_inputs)
    maps = [  # (S, N, C) → (S, N · T, C, *)
        (values if parts == 1 else values.repeat_interleave(parts, 1)).view(
            num_draws, -1, x.shape[1], *(1 for _ in x.shape[2:])
        )
        for values in condition(own, BatchNormCall(x, mean, var, weight, bias, eps=eps), share)
    ]
    return apply_to_rows(x, *maps, num_draws=num_draws, is_drawn=is_drawn)
