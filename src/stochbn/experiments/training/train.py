"""Trains one network by a recipe and a seed, in one visible loop that can be killed at any moment and resumed.

    stochbn train lenet5 --seed 0

A checkpoint follows each epoch. A resumed run ends with the same bits as an uninterrupted one, on the same machine
with the same number of threads.
"""

import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

from stochbn.experiments.data.sources import check_writable
from stochbn.experiments.data.splits import Split, load_split, to_inputs
from stochbn.experiments.training.checkpoints import (
    Checkpoint,
    checkpoint_path,
    find_checkpoint,
    is_trained,
    locked,
    write_checkpoint,
)
from stochbn.experiments.training.parallel import Parallel
from stochbn.experiments.training.recipes import Recipe
from stochbn.statistics.normalization import Answering, BatchNormCall
from stochbn.statistics.parts import ALONE, Peers


def train(
    recipe: Recipe,
    seed: int,
    *,
    folder: Path | None = None,
    console: Console | None = None,
    lock: bool = True,
    peers: Peers = ALONE,
) -> Path:
    """Trains a network, or finishes training it, and returns its checkpoint's path. A finished run is left alone.

    Args:
        recipe: What to train and how.
        seed: Determines initial weights, order of the data, augmentation and dropout.
        folder: Where you keep the published data files, asked before any download.
        console: Where progress goes: a live display on a terminal, else one line an epoch.
        lock: Whether to keep other processes from this network; not if the caller already does.
        peers: The processes that train it together, all by this call; the first one validates and writes.

    Raises:
        CheckpointError: The checkpoint is damaged or of another recipe, or another process trains this network.
    """
    path = checkpoint_path(recipe, seed)
    checkpoint = find_checkpoint(recipe, seed)
    peers.agree({"number of epochs in the checkpoint": len(checkpoint.history) if checkpoint else 0})
    if not is_trained(recipe, seed):
        check_writable(path.parent)
        with locked(path, f"{recipe.name} seed {seed}") if lock and peers.rank == 0 else nullcontext():
            _train(recipe, seed, path, folder, console or Console(), peers)
    peers.gather(None)  # for all of them the file is there
    return path


def _train(recipe: Recipe, seed: int, path: Path, folder: Path | None, console: Console, peers: Peers) -> None:
    checkpoint = find_checkpoint(recipe, seed)
    if checkpoint and checkpoint.finished:  # by another process, before this one got the lock
        return
    training = load_split(recipe.data, "train", folder=folder, class_seed=recipe.class_seed)
    validation = load_split(recipe.data, "validation", folder=folder, class_seed=recipe.class_seed)
    steps_per_epoch = len(training) // recipe.batch_size
    num_steps = recipe.epochs * steps_per_epoch
    if num_steps < 1:
        raise ValueError(f"Expected at least one epoch of one batch, got {recipe.epochs} epochs of {steps_per_epoch}.")

    with torch.random.fork_rng(devices=[]), _build_progress(console) as progress:
        torch.manual_seed(seed)
        network = recipe.build_network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = _build_optimizer(recipe, network)
        history = checkpoint.history if checkpoint else []
        if checkpoint:
            network.load_state_dict(checkpoint.weights)
            _restore(optimizer, network, checkpoint.resume)
        parallel = Parallel(network, recipe, seed, peers)
        bar = progress.add_task(f"{recipe.name} seed {seed}", total=num_steps, loss=math.nan, accuracy="—")
        progress.update(bar, completed=len(history) * steps_per_epoch)

        for epoch in range(len(history), recipe.epochs):
            start = time.perf_counter()
            network.train()
            size = recipe.image_size(epoch)
            loss_sum = torch.zeros(())
            batches = torch.randperm(len(training))[: steps_per_epoch * recipe.batch_size].view(-1, recipe.batch_size)
            with parallel.epoch():
                for step, batch in enumerate(batches, start=epoch * steps_per_epoch):
                    images = training.images[batch]
                    images = (augment(images) if recipe.augment else images)[parallel.images]
                    inputs = resize(to_inputs(images), size)
                    optimizer.zero_grad()
                    with parallel.step(step):
                        with (
                            ghost_batches(recipe.mini_batch_size),
                            torch.autocast("cpu", enabled=recipe.mixed_precision),
                        ):
                            logits = parallel(inputs)
                        loss = F.cross_entropy(logits.float(), training.labels[batch][parallel.images])
                        loss.backward()
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(recipe, step / num_steps)
                    optimizer.step()
                    loss_sum += loss.detach()
                    if step % 50 == 0:
                        progress.update(bar, completed=step, loss=loss.item())
            train_loss = parallel.mean(loss_sum.item()) / steps_per_epoch
            if peers.rank > 0:
                peers.gather(None)  # the checkpoint is written; else the first one says here why not
                continue
            nll, error = validate(network, validation)
            seconds = time.perf_counter() - start
            record = {"train_loss": train_loss, "validation_nll": nll, "validation_error": error, "seconds": seconds}
            history = [*history, record]
            resume = _capture(optimizer) if epoch + 1 < recipe.epochs else {}
            write_checkpoint(path, Checkpoint(recipe, seed, history, network.state_dict(), resume))
            progress.update(bar, completed=(epoch + 1) * steps_per_epoch, loss=train_loss, accuracy=f"{1 - error:.2%}")
            if not console.is_terminal:
                line = f"epoch {epoch + 1}/{recipe.epochs}  train loss {train_loss:.4f}  "
                line += f"validation NLL {nll:.4f}  error {error:.2%}  {seconds:.1f} s"
                console.print(line, soft_wrap=True, highlight=False)
            peers.gather(None)


def learning_rate(recipe: Recipe, progress: float) -> float:
    """Returns the learning rate after this fraction of all steps.

    Adam's falls linearly to 0. SGD's rises linearly from a 25th over the first 30 % and then falls to 0 along a cosine.

    Examples:
        >>> from stochbn.experiments.training.recipes import RECIPES
        >>> learning_rate(RECIPES["lenet5"], 0.25)
        0.00075
    """
    if recipe.optimizer == "adam":
        return recipe.learning_rate * (1 - progress)
    if progress < 0.3:
        return recipe.learning_rate * (0.04 + 0.96 * progress / 0.3)
    return recipe.learning_rate * (1 + math.cos(math.pi * (progress - 0.3) / 0.7)) / 2


def ghost_batches(size: int) -> Answering:
    """Returns a context where BatchNorm layers in train mode normalise each `size` successive examples by themselves.

    A layer's running statistics move once for each of them, in their order. So the layers see what they would see if
    the mini-batches came one after the other; the optimiser sees one large batch, which costs less than several small.

    Examples:
        >>> layer = nn.BatchNorm1d(3)
        >>> x = torch.arange(24.0).view(8, 3)
        >>> with ghost_batches(4):
        ...     together = layer(x)
        >>> torch.equal(together, torch.cat([layer(x[:4]), layer(x[4:])]))
        True
    """

    def normalize(call: BatchNormCall) -> Tensor:
        if not call.training or len(call.input) == size:
            return F.batch_norm(*call)
        return torch.cat([F.batch_norm(part, *call[1:]) for part in call.input.split(size)])

    return Answering(normalize)


def resize(inputs: Tensor, size: int | None) -> Tensor:
    """Averages images down to a side of `size` pixels; None leaves them.

    Examples:
        >>> resize(torch.ones(2, 3, 32, 32), 24).shape
        torch.Size([2, 3, 24, 24])
    """
    if size is None or inputs.shape[-1] == size:
        return inputs
    return F.interpolate(inputs, size=(size, size), mode="bilinear", align_corners=False, antialias=True)


def augment(images: Tensor) -> Tensor:
    """Crops each image at random out of its reflection-padded version (4 pixels) and flips half of them.

    Draws from torch's random state.

    Shape:
        (N, C, H, W) → (N, C, H, W), in any dtype.

    Examples:
        >>> augment(torch.ones(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])
    """
    num_images, _, height, width = images.shape
    rows = _reflect(torch.randint(-4, 5, (num_images, 1)) + torch.arange(height), height)  # (N, H)
    columns = _reflect(torch.randint(-4, 5, (num_images, 1)) + torch.arange(width), width)  # (N, W)
    columns = torch.where(torch.rand(num_images, 1) < 0.5, columns.flip(1), columns)
    index = torch.arange(num_images)[:, None, None]
    # Indexing around the slice puts the channels last: (N, H, W, C).
    return images[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def validate(network: nn.Module, split: Split, batch_size: int = 500) -> tuple[float, float]:
    """Returns the mean negative log-likelihood in nats and the fraction of errors. Leaves the network in `eval()`."""
    network.eval()
    nll, num_errors = 0.0, 0
    for images, labels in zip(split.images.split(batch_size), split.labels.split(batch_size), strict=True):
        logits = network(to_inputs(images))  # (N, K)
        nll += F.cross_entropy(logits, labels, reduction="sum").item()
        num_errors += int((logits.argmax(1) != labels).sum())
    return nll / len(split), num_errors / len(split)


def _capture(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns what has to be known, besides the weights, to go on: the optimiser's tensors and the random state."""
    states = optimizer.state_dict()["state"]
    tensors = {f"optimizer.{index}.{key}": value for index, state in states.items() for key, value in state.items()}
    return {**tensors, "random_state": torch.get_rng_state()}


def _restore(optimizer: torch.optim.Optimizer, network: nn.Module, resume: dict[str, Tensor]) -> None:
    for index, parameter in enumerate(network.parameters()):
        prefix = f"optimizer.{index}."
        for name in (name for name in resume if name.startswith(prefix)):
            value = resume[name]
            if value.shape == parameter.shape:  # in the parameter's own memory format, as the fused step expects
                value = torch.empty_like(parameter, requires_grad=False).copy_(value)
            optimizer.state[parameter][name.removeprefix(prefix)] = value
    torch.set_rng_state(resume["random_state"])


def _build_optimizer(recipe: Recipe, network: nn.Module) -> torch.optim.Optimizer:
    weights, lr, weight_decay = network.parameters(), recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adam":
        return torch.optim.Adam(weights, lr, weight_decay=weight_decay, fused=True)
    return torch.optim.SGD(weights, lr, momentum=0.9, nesterov=True, weight_decay=weight_decay, fused=True)


def _reflect(index: Tensor, size: int) -> Tensor:
    index = index.abs()
    return torch.where(index < size, index, 2 * (size - 1) - index)


def _build_progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),  # what the others leave of the line
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
