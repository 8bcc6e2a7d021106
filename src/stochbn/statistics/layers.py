"""Finding a model's BatchNorm and dropout layers by name."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from stochbn.statistics.checks import listing

Layers = Iterable[str] | Callable[[str, nn.Module], bool] | None


def buffer_names(layer: str) -> tuple[str, str]:
    """Names a layer's two buffers in the state dict; the layer's name is empty when it is the model itself."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def all_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Finds the BatchNorm layers by name, in the order of the model; at least one."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        frozen = [name for name, module in model.named_modules() if "FrozenBatchNorm" in type(module).__name__]
        if frozen:
            raise ValueError(
                f"Expected BatchNorm layers, got {listing(frozen)}, which are frozen: no mini-batch normalised them in "
                "training, so there is no spread to fit. Use nn.BatchNorm2d if the model was trained with that."
            )
        raise ValueError(
            f"Expected a model with batch normalization, got {type(model).__name__} without any BatchNorm layer. "
            "Dropout and Deep Ensembles need none: call predict(model, None, …)."
        )
    return found


def find_layers(model: nn.Module, layers: Layers = None) -> dict[str, _BatchNorm]:
    """Finds the BatchNorm layers to treat, by name, in the order of the model.

    Args:
        model: Any module, or a BatchNorm layer itself (whose name is then empty).
        layers: Names or shell patterns (`"layer4.*"`), a predicate of name and module, or None for all.
    """
    found = all_batch_norms(model)
    if layers is None:
        chosen = found
    elif callable(layers):
        chosen = {name: layer for name, layer in found.items() if layers(name, layer)}
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]
        if idle:
            raise ValueError(
                f"Expected layers= to name BatchNorm layers, got {idle}, which match none. "
                f"The model has {listing(found)}."
            )
        chosen = {n: layer for n, layer in found.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    if not chosen:
        raise ValueError(
            f"Expected layers= to leave at least one BatchNorm layer, got none of {len(found)}. "
            f"The model has {listing(found)}."
        )
    for name, layer in chosen.items():
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(
                f"Expected running statistics in every BatchNorm layer, got {name!r} with track_running_stats=False. "
                "Leave such layers out: layers=lambda name, layer: layer.running_mean is not None."
            )
        if isinstance(layer.running_mean, nn.UninitializedBuffer):
            raise ValueError(
                f"Expected initialised layers, got the lazy {name!r}. Run the model once on an example first."
            )
    return chosen


def dropout_layers(model: nn.Module) -> dict[str, _DropoutNd]:
    """Finds the dropout layers by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _DropoutNd)}
    if not found:
        raise ValueError(
            f"Expected a model with Dropout layers for dropout=True, got {type(model).__name__} with none. "
            "Leave dropout off, or give the model nn.Dropout modules: functional dropout cannot be switched."
        )
    return found
