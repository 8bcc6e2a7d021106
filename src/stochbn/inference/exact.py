"""Eq. 3 with real mini-batches, the inference that SBN approximates, and the lower bound of Appendix A."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stochbn.inference.engine.stacking import Output
from stochbn.inference.predict import check_options, is_loader
from stochbn.inference.prediction import Average, Link, Prediction, check_logits, join
from stochbn.statistics.calls import Call, call_on_inputs, device_of, unwrap, without_labels
from stochbn.statistics.items import copy_to, describe, has_rows, map_leaves, num_examples, rows
from stochbn.statistics.layers import all_batch_norms
from stochbn.statistics.mini_batches import length, mini_batches
from stochbn.statistics.normalization import BatchNormalization, call_answered
from stochbn.statistics.progress import progress_bar
from stochbn.statistics.restoring import KeepingModes, keeping_tensors
from stochbn.statistics.twin import make_twin
from stochbn.uncertainty import class_indices

# A pass holds as many mini-batches as fit into this many examples.
STACKED_EXAMPLES = 512


def exact_predict(
    model: nn.Module,
    loader: Iterable[Any],
    inputs: Any,
    *,
    batch_size: int | None = None,
    num_samples: int = 50,
    seed: int = 0,
    link: Link = "softmax",
    call: Call | None = None,
    chunk_size: int | None = None,
    keep_samples: bool = True,
    progress: bool = False,
) -> Prediction:
    """Predicts by eq. 3 without approximation: p(y | x) = E_B p(y | x, μ(B), σ(B)). The model is left as it was.

    For each sample s, every input is put in a mini-batch of its own with the same M − 1 training examples, which
    normalise it at every layer; the mini-batches go through the network together. M times the cost of `predict`.

    Args:
        model: A trained network, in any mode.
        loader: Shuffled training data, with at least `num_samples` mini-batches.
        inputs: A tensor, a mapping of keyword arguments, or a DataLoader or other iterable of batches.
        batch_size: M; by default the loader's batch size.
        num_samples: S, the number of mini-batches to average over.
        seed: Of torch's generator while the loader is read, so that its shuffling is repeatable. That generator is
            the whole process's: no other thread should draw from it meanwhile.
        link: As in `predict`.
        call: How the model is called on a batch. With it, `inputs` must be built like what the loader yields.
        chunk_size: How many mini-batches go through the network at once.
        keep_samples: Keep every sample's prediction.
        progress: Show a progress bar.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(20)]
        >>> exact_predict(model, loader, torch.randn(5, 2), num_samples=10)
        Prediction(5×3, link='softmax', num_samples=10)
    """
    check_options(num_samples=num_samples, chunk_size=chunk_size, link=link)
    model = unwrap(model)
    device = device_of(model)
    twin = make_twin(model)  # the model itself is never touched
    called = Output(twin, call or call_on_inputs)
    take = call is None and is_loader(inputs)
    batches = inputs if is_loader(inputs) else [inputs]
    rounds = (length(batches) or 0) * num_samples or None
    results = []
    normalization = BatchNormalization(all_batch_norms(twin), record=False)
    with (
        KeepingModes(),
        torch.no_grad(),
        keeping_tensors(twin),
        progress_bar("exact", "sample", rounds, shown=progress) as bar,
    ):
        companions = [
            copy_to(item, device)
            for item in _companions(loader, batch_size, num_samples, seed, None if call else without_labels)
        ]
        for item in batches:
            item = copy_to(without_labels(item) if take else item, device)
            average = Average(link, keep_samples)
            for companion in companions:
                size = chunk_size or max(1, STACKED_EXAMPLES // (num_examples(companion) + 1))
                outputs = []
                for start in range(0, num_examples(item), size):
                    some = rows(item, start, start + size)
                    normalization.num_batches = num_examples(some)
                    together = call_answered(normalization.answer, called, _surround(some, companion))  # (n · M, …)
                    outputs.append(together.unflatten(0, (normalization.num_batches, -1))[:, 0])
                average.add(torch.cat(outputs).unsqueeze(0))
                bar.update()
            results.append(average.prediction())
    return join(results)


@dataclass(frozen=True, eq=False)
class LowerBound:
    """Both sides of Jensen's inequality in Appendix A, for N examples, from S mini-batches.

    Attributes:
        log_probs: (S, N) log p(y_i | x_i, μ_s, σ_s) in float64; (S, N, *) for outputs with a trailing shape.
    """

    log_probs: Tensor

    @property
    def lower(self) -> Tensor:
        """(N,) E log p, what training maximises: L_BN(θ) of Appendix A, per example."""
        return self.log_probs.mean(0)

    @property
    def marginal(self) -> Tensor:
        """(N,) log E p, the marginal log-likelihood L(θ), per example. Biased down, by about Var(p) / (2 S E(p)²)."""
        return self.log_probs.logsumexp(0) - math.log(len(self.log_probs))

    @property
    def gap(self) -> Tensor:
        """(N,) marginal − lower, never below 0."""
        return (self.marginal - self.lower).clamp_min(0)

    @property
    def standard_errors(self) -> dict[str, Tensor]:
        """(N,) Monte Carlo standard error of each of the three, the marginal's and the gap's by the delta method."""
        return {name: _standard_error(values) for name, values in self._influences().items()}

    def summary(self) -> dict[str, tuple[float, float]]:
        """Returns the mean over the examples of lower, marginal and gap, each with its Monte Carlo standard error.

        The mini-batches are the same for all examples, whose errors are therefore correlated: they are averaged
        over the examples before the error is taken over the samples.
        """
        return {
            name: (getattr(self, name).mean().item(), _standard_error(values.flatten(1).mean(1)).item())
            for name, values in self._influences().items()
        }

    def _influences(self) -> dict[str, Tensor]:
        # What sample s adds to each estimate, up to a constant: log p_s, p_s / mean p, and their difference. (S, N)
        ratio = (self.log_probs - self.marginal).exp()
        return {"lower": self.log_probs, "marginal": ratio, "gap": ratio - self.log_probs}


def lower_bound(
    model: nn.Module,
    loader: Iterable[Any],
    inputs: Any,
    targets: Tensor,
    *,
    batch_size: int | None = None,
    num_samples: int = 50,
    seed: int = 0,
    call: Call | None = None,
    chunk_size: int | None = None,
    progress: bool = False,
) -> LowerBound:
    """Estimates the bound that batch normalisation maximises, and how far below the marginal likelihood it lies.

    Appendix A: Σ_i E log p(y_i | x_i, μ, σ) ≤ Σ_i log E p(y_i | x_i, μ, σ), with mini-batches as in `exact_predict`.

    Args:
        model: A trained classifier whose outputs are logits.
        loader: Shuffled training data.
        inputs: Examples, as in `exact_predict`.
        targets: (N,) their classes; (N, *) for outputs with a trailing shape.
        batch_size: M; by default the loader's batch size.
        num_samples: S ≥ 2.
        seed: As in `exact_predict`, like the rest.
        call: As there.
        chunk_size: As there.
        progress: Show a progress bar.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(20)]
        >>> bound = lower_bound(model, loader, torch.randn(5, 2), torch.zeros(5, dtype=torch.long), num_samples=20)
        >>> bool((bound.lower <= bound.marginal).all())
        True
    """
    if num_samples < 2:
        raise ValueError(f"Expected num_samples of at least 2 for a bound, got {num_samples}. Pass 50 or more.")
    outputs = exact_predict(
        model,
        loader,
        inputs,
        batch_size=batch_size,
        num_samples=num_samples,
        seed=seed,
        link="identity",
        call=call,
        chunk_size=chunk_size,
        progress=progress,
    ).samples
    assert outputs is not None
    check_logits(outputs)
    log_probs = outputs.double().log_softmax(2)  # (S, N, K, *)
    indices = class_indices(log_probs[0], targets.to(outputs.device)).expand(
        len(log_probs), *[-1] * (outputs.dim() - 1)
    )
    return LowerBound(log_probs.gather(2, indices).squeeze(2))


def _companions(
    loader: Iterable[Any],
    batch_size: int | None,
    num_samples: int,
    seed: int,
    pick: Callable[[Any], Any] | None,
) -> list[Any]:
    """Reads S times M − 1 training examples, while torch's generator has this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        found = [
            rows(item, start + 1, start + size)
            for item, count, size in mini_batches(loader, batch_size=batch_size, num_batches=num_samples, pick=pick)
            for start in range(0, count * size, size)
        ]
    if len(found) < num_samples:
        raise ValueError(
            f"Expected at least num_samples={num_samples} mini-batches of training data, got {len(found)}. "
            "Pass a longer loader, a smaller batch_size= or fewer samples."
        )
    return found


def _surround(some: Any, companion: Any) -> Any:
    """Puts each of n examples first in a mini-batch of its own with the M − 1 companions: n · M examples."""
    count, num_others = num_examples(some), num_examples(companion)

    def surround(leaf: Any, others: Any) -> Any:
        if not (has_rows(leaf, count) and has_rows(others, num_others)):
            return leaf
        if isinstance(leaf, Tensor):
            others = others.expand(count, *others.shape)  # (n, M − 1, …)
            return torch.cat([leaf.unsqueeze(1), others], dim=1).flatten(0, 1)
        return [one for first in leaf for one in (first, *others)]

    try:
        return map_leaves(surround, some, companion)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"Expected inputs built like the loader's batches, got {describe(some)} for batches of "
            f"{describe(companion)}. Pass inputs of the same form and shape; with call=, whole batches."
        ) from error


def _standard_error(values: Tensor) -> Tensor:
    return values.std(0) / math.sqrt(len(values))
