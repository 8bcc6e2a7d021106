"""Model × draws → one file that predicts, in any runtime: with probabilities and uncertainties as its outputs."""

import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from stochbn.distributions.base import Distribution
from stochbn.distributions.tuning import Tuning
from stochbn.inference.engine.captured import CaptureError
from stochbn.inference.engine.code import first_line
from stochbn.inference.engine.graph import Flat
from stochbn.inference.engine.network import Network
from stochbn.inference.predict import Predictor, Stats
from stochbn.inference.prediction import Average, Link, Prediction
from stochbn.statistics.calls import Call
from stochbn.statistics.checks import check_whole
from stochbn.statistics.items import fill, has_rows, num_examples, rows, tensors_in
from stochbn.statistics.restoring import raise_if_interrupted
from stochbn.statistics.twin import make_twin

OUTPUTS = {
    "softmax": ("probs", "entropy", "aleatoric", "epistemic"),
    "sigmoid": ("probs", "entropy", "aleatoric", "epistemic"),
    "identity": ("mean", "std"),
}
MAX_DIFFERENCE = 1e-3  # between the file and `predict`, relative to the largest output; rounding stays far below


def export(
    model: nn.Module | Sequence[nn.Module],
    stats: Stats | Sequence[Stats],
    example: Any,
    path: str | os.PathLike[str],
    *,
    num_samples: int = 50,
    seed: int = 0,
    link: Link = "softmax",
    dropout: bool = False,
    call: Call | None = None,
) -> float:
    """Writes a model with its draws to a file that predicts without this package. Changes nothing else.

    The file takes batches of any size and returns `probs`, `entropy`, `aleatoric` and `epistemic`; with link "identity"
    `mean` and `std`. Draws, dropout's masks, the tuned spread and temperature are part of it. It draws no random
    numbers: equal inputs have equal answers, in every runtime. All draws of a batch are computed at once, so memory
    grows with the number of draws that follow the first drawn layer.

    Args:
        model: As in `predict`, and so are `stats`, `num_samples`, `seed`, `link`, `dropout` and `call`.
        stats: What `fit` or `tune` returned; for several models a sequence. The file has its noise in the metadata.
        example: A batch such as the file is for: a tensor, a tuple of positional or a mapping of keyword arguments,
            whose keys become the names of the file's inputs.
        path: Ends in `.onnx`, for ONNX Runtime and others (needs the extra `export`); or in `.pt2`, machine code by
            AOTInductor, for `torch._inductor.aoti_load_package`. Without a C++ compiler that is a program for
            `torch.export.load`.
        num_samples: S.
        seed: Of the draws.
        link: As in `predict`.
        dropout: As in `predict`.
        call: As in `predict`.

    Returns:
        The largest difference between what the file and `predict` give on the example.

    Raises:
        ValueError: The model cannot be captured, or the path is of another kind.
        ModuleNotFoundError: The extra is not installed.

    Examples:
        >>> import stochbn, tempfile
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(20)]
        >>> for x in loader:
        ...     _ = model(x)
        >>> stats = stochbn.fit(model, loader, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(model, stats, torch.randn(5, 2), f"{folder}/net.onnx", num_samples=256) < 1e-5
        True
    """
    target = Path(path)
    if target.suffix not in _KINDS:
        raise ValueError(f"Expected a path that ends in .onnx or .pt2, got {str(target)!r}. Choose one of the two.")
    if not target.parent.is_dir():
        raise ValueError(f"Expected a folder that exists, got {str(target.parent)!r}. Make it first.")
    check_whole("num_samples", num_samples, 1)
    write, run, needed = _KINDS[target.suffix]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f"Expected {missing[0]} for {target.suffix} files. pip install 'stochbn[export]'.")
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "link": link, "dropout": dropout}
    predictor = Predictor(model, stats, **options, call=call, keep_samples=False)
    expected = predictor(example)  # first: it says best what is wrong with an example
    networks = predictor._networks
    try:
        whole = _Whole(networks, example, link)
    except CaptureError as error:
        raise ValueError(
            f"Expected a model whose forward pass can be captured, got {type(networks[0].model).__name__}: {error}. "
            "Change what it says, or predict with stochbn.Predictor."
        ) from error
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        draft = Path(folder) / target.name
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own exporters
            try:
                write(whole, example, _describe(stats, options), draft)
            except Exception as error:
                raise_if_interrupted(error)
                cause: BaseException = error
                while cause.__cause__ is not None:  # torch's exporters say what is wrong in the first error of several
                    cause = cause.__cause__
                raise ValueError(
                    f"Expected a model that can be written as {target.suffix}, got {type(networks[0].model).__name__}: "
                    f"{first_line(cause)}. Try the other kind of file, or predict with stochbn.Predictor."
                ) from error
            found = run(draft, tensors_in(example))
        difference = _compare(found, expected, OUTPUTS[link])
        os.replace(draft, target)
    return difference


def name_inputs(example: Any) -> list[str]:
    """Returns the names of a file's inputs, one a tensor of the example.

    Examples:
        >>> name_inputs(torch.ones(2)), name_inputs({"image": torch.ones(2), "text": torch.ones(2)})
        (['input'], ['image', 'text'])
    """
    if isinstance(example, Mapping):
        return [str(key) for key, value in example.items() for _ in tensors_in(value)]
    count = len(tensors_in(example))
    return ["input"] if count == 1 else [f"input{number}" for number in range(count)]


class _Whole(nn.Module):
    """All members and draws as one forward pass, from the tensors of an item to the named outputs."""

    def __init__(self, networks: Sequence[Network], example: Any, link: Link) -> None:
        super().__init__()
        self.link = link
        self.members = nn.ModuleList([_Member(network, example) for network in networks])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        average = Average(self.link, keep_samples=False, checks=False)
        for member in self.members:
            assert isinstance(member, _Member)
            average.add(member(*inputs), 1 / member.num_draws, member.temperature)
        prediction = average.prediction()
        return tuple(getattr(prediction, name) for name in OUTPUTS[self.link])


class _Member(nn.Module):
    """One model with all of its draws: its graphs, and the tensors that they take."""

    def __init__(self, network: Network, example: Any) -> None:
        super().__init__()
        self.num_draws, self.temperature = network.num_draws, network.temperature
        self.is_drawn = network.is_drawn
        count = num_examples(example)
        self.first = next(number for number, t in enumerate(tensors_in(example)) if has_rows(t, count))
        if not self.is_drawn:  # a plain network
            self.plain = Flat(make_twin(network.model), network.call, example, dropout=False)
            return
        prepared = network.prepare(example)
        self.captured = [prepared.captured]  # in a list, so that its graphs are no parts of this module
        used = {*prepared.captured.shared_arguments, *prepared.captured.drawn_arguments}
        tensors = {name: tensor for name, tensor in prepared.tensors.items() if name in used}
        self.places = {name: f"tensor{number}" for number, name in enumerate(tensors)}
        for name, place in self.places.items():
            self.register_buffer(place, tensors[name].contiguous())
        self.num_maps = len(prepared.maps)
        for number, values in enumerate(prepared.maps):
            self.register_buffer(f"map{number}", values)

    def forward(self, *inputs: Tensor) -> Tensor:
        if not self.is_drawn:
            output: Tensor = self.plain(*inputs)
            return output.unsqueeze(0)
        (captured,) = self.captured
        tensors = {name: getattr(self, place) for name, place in self.places.items()}
        tensors |= {f"input{number}": tensor for number, tensor in enumerate(inputs)}
        num_inputs = inputs[self.first].shape[0]
        maps = [getattr(self, f"map{number}") for number in range(self.num_maps)]
        stacked: Tensor = captured.draw(captured.share(tensors, num_inputs), maps, self.num_draws, num_inputs)
        return stacked


def _example_of(example: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Returns the tensors to trace with, and which of their axes are the batch."""
    tensors = tensors_in(fill(rows(example, 0, 4), 4))  # sizes of 0 and 1 would become constants
    batch = Dim("batch")
    return tuple(tensors), (tuple({0: batch} if has_rows(tensor, 4) else None for tensor in tensors),)


def _write_onnx(whole: _Whole, example: Any, about: dict[str, str], path: Path) -> None:
    tensors, shapes = _example_of(example)
    options: dict[str, Any] = {
        "input_names": name_inputs(example),
        "output_names": OUTPUTS[whole.link],
        "verbose": False,
    }
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of operators of libraries that are not installed
    try:
        written = torch.onnx.export(whole, tensors, dynamo=True, dynamic_shapes=shapes, optimize=True, **options)
    finally:
        logger.setLevel(level)
    assert written is not None
    written.model.metadata_props.update(about)
    written.save(path, external_data=False)


def _has_compiler() -> bool:
    return bool(shutil.which("g++") or shutil.which("clang++"))


def _write_pt2(whole: _Whole, example: Any, about: dict[str, str], path: Path) -> None:
    tensors, shapes = _example_of(example)
    program = torch.export.export(whole, tensors, dynamic_shapes=shapes, strict=False)
    if _has_compiler():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": about}
        )
    else:
        torch.export.save(program, path, extra_files={"stochbn.json": json.dumps(about)})


def _run_onnx(path: Path, inputs: list[Tensor]) -> list[Tensor]:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    taken = {place.name: number for number, place in enumerate(session.get_inputs())}
    given = {name: inputs[number].detach().cpu().numpy() for name, number in taken.items()}
    return [torch.from_numpy(values) for values in session.run(None, given)]


def _run_pt2(path: Path, inputs: list[Tensor]) -> list[Tensor]:
    given = [tensor.detach() for tensor in inputs]
    if _has_compiler():
        found = torch._inductor.aoti_load_package(str(path))(*given)
    else:
        found = torch.export.load(path).module()(*given)
    return [tensor.cpu() for tensor in found]


# How files of a kind are written and run, and what that needs.
_KINDS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    ".onnx": (_write_onnx, _run_onnx, ("onnx", "onnxscript", "onnxruntime")),
    ".pt2": (_write_pt2, _run_pt2, ()),
}


def _compare(found: list[Tensor], expected: Prediction, names: Sequence[str]) -> float:
    """Returns the largest difference of any output; raises if it is no rounding."""
    largest = 0.0
    for values, name in zip(found, names, strict=True):
        wanted = getattr(expected, name).cpu()
        difference = float((values - wanted).abs().max()) if values.shape == wanted.shape else math.inf
        if not difference <= MAX_DIFFERENCE * max(1.0, float(wanted.abs().max())):
            raise RuntimeError(
                f"Expected the file to give what predict gives, got {name} that differs by {difference:.2g}. Nothing "
                "was written. Try the other kind of file, and please report it."
            )
        largest = max(largest, difference)
    return largest


def _describe(stats: Stats | Sequence[Stats], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a file is made of, as text by name."""
    sources = stats if isinstance(stats, (list, tuple)) else [stats]
    about = {name: str(value) for name, value in options.items()}
    about |= {
        "made_by": f"stochbn {importlib.metadata.version('stochbn')}",
        "statistics": "; ".join(map(repr, sources)),
    }
    tunings = [source.tuning if isinstance(source, Distribution) else source for source in sources]
    tunings = [tuning for tuning in tunings if isinstance(tuning, Tuning)]
    for name in ("spread", "temperature", "noise") if tunings else ():
        about[name] = "; ".join(dict.fromkeys(str(getattr(tuning, name)) for tuning in tunings))  # each once
    return about
