"""Prediction files → methods with their predictions, ensembles and what validation data choose among them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stochbn.distributions.storage import brief
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import PARTS, File, average, unpack
from stochbn.experiments.methods import METHODS, SPREADS, Method
from stochbn.experiments.report.choose import Network, can_choose, choose_spread, is_end, temper_network
from stochbn.experiments.report.scores import Chosen, Output, Results, Scored, log_loss
from stochbn.experiments.training.recipes import EXPERIMENTS

Networks = dict[int, Network]  # by seed

_SPREAD = (("stage", "stage-tuned"), ("last", "last-tuned"))  # with the fitted spread, and with a chosen one
_VALIDATION = "labels/validation"
_SAME = (("tuned", "sbn"), ("dropout+tuned", "dropout+sbn"))  # where validation data leave the fitted spread
_MUST_AGREE = ("experiment", "options", "data", "out_of_domain", "classes", "num_samples", "draw_seed")


def collect(files: Sequence[File]) -> Results:
    """Joins the prediction files of one experiment into methods; an ensemble needs two networks.

    Where all files have predictions of validation data too, these choose temperatures and spreads.

    Raises:
        DataError: The files are not all of one experiment, setting and test set, or two are of the same network.
    """
    for key in _MUST_AGREE:
        found = {str(file.header.get(key)): file.path for file in files}  # value → a file that has it
        if len(found) > 1:
            values, paths = (brief(" and ".join(map(str, names))) for names in zip(*sorted(found.items()), strict=True))
            raise DataError(
                f"Expected prediction files of one experiment, got {key} {values} in {paths}. "
                "Keep each experiment in a folder of its own, or evaluate again."
            )
    has_out_of_domain = all(any("/out-of-domain/" in name for name in file.tensors) for file in files)
    has_validation = all(_VALIDATION in file.tensors for file in files)
    parts = [*(PARTS if has_out_of_domain else PARTS[:1]), *(["validation"] if has_validation else [])]
    _check_together(files, parts)
    labels = _read_labels(files, "labels")
    networks = _read_networks(files, parts)
    validation = _read_labels(files, _VALIDATION) if has_validation else None
    chosen = {} if validation is None else _choose(networks, validation)
    methods = {
        scored.method.key: scored
        for method in METHODS.values()
        for scored in _list_rows(method, networks, chosen, validation)
    }
    for tuned, fitted in _SAME:
        if tuned in methods and fitted in methods and _is_same(networks[tuned], networks[fitted]):
            del methods[tuned]  # the fitted spread stands
    if not methods:
        raise DataError(f"Expected predictions by a known method in {files[0].path}, got none. Evaluate again.")
    if experiment := EXPERIMENTS.get(files[0].header["experiment"]):
        for key, scored in methods.items():
            wanted = experiment.num_dropout_seeds if scored.method.group == "dropout" else experiment.num_seeds
            methods[key] = replace(scored, num_wanted=wanted)
    plain = networks.get("plain", {}).values()
    is_undecided = validation is not None and not any(can_choose(one["validation"][0], validation) for one in plain)
    return Results(files[0].header, labels, methods, has_out_of_domain, is_undecided)


def select_exact(results: Results, diagnostics: File) -> Results | None:
    """Returns exact inference (eq. 3) beside the same network, plain and with SBN, on the inputs that it was run on."""
    seed = diagnostics.header.get("seed", 0)  # earlier files do not name it, and are all of the first
    beside = [results.methods[key] for key in ("plain", "sbn") if key in results.methods]
    parts = [part for part in PARTS if f"exact/{part}/index" in diagnostics.tensors]
    if not results.has_out_of_domain:
        parts = parts[:1]
    if "test" not in parts or len(beside) < 2 or any(seed not in scored.seeds for scored in beside):
        return None
    rows = {part: diagnostics.tensors[f"exact/{part}/index"].long() for part in parts}
    for part, index in rows.items():
        probs = beside[0].outputs[0][part].probs  # (N, K)
        if index.max() >= len(probs) or diagnostics.tensors[f"exact/{part}/log_probs"].shape[1] != probs.shape[1]:
            raise DataError(
                f"Expected exact inference on the {len(probs)} {part} inputs of the predictions, got others in "
                f"{diagnostics.path}. Evaluate again."
            )
    found: dict[Method, dict[str, Output]] = {}
    for scored in beside:
        whole = scored.outputs[scored.seeds.index(seed)]
        found[scored.method] = {part: _take(whole[part], index) for part, index in rows.items()}
    found[METHODS["exact"]] = {part: Output(*unpack(diagnostics, "exact", part)) for part in parts}
    methods = {method.key: Scored(method, (seed,), (output,), (output,)) for method, output in found.items()}
    return Results(results.header, results.labels[rows["test"]], methods, len(parts) > 1)


def has_dropout(file: File) -> bool:
    """Returns whether a prediction file is of a network with dropout."""
    return "dropout/test/log_probs" in file.tensors


def _check_together(files: Sequence[File], parts: Sequence[str]) -> None:
    """Raises unless each file is of a network of its own, and all are on inputs of the same number."""
    seen: dict[tuple[bool, int], File] = {}
    for file in files:
        other = seen.setdefault((has_dropout(file), file.header["seed"]), file)
        if other is not file:
            raise DataError(f"Expected one file a network, got two of one: {other.path} and {file.path}. Remove one.")
        for part in parts:
            first, own = (_count(one, part) for one in (files[0], file))
            if own != first:
                raise DataError(
                    f"Expected prediction files on one data set, got {first} {part} inputs in {files[0].path} and "
                    f"{own} in {file.path}. Evaluate again."
                )


def _count(file: File, part: str) -> int:
    return next(len(tensor) for name, tensor in file.tensors.items() if f"/{part}/" in name)


def _read_labels(files: Sequence[File], name: str) -> Tensor:
    for file in files:
        if not torch.equal(file.tensors[name], files[0].tensors[name]):
            raise DataError(
                f"Expected prediction files on one data set, got different labels in {files[0].path} and {file.path}. "
                "Evaluate again."
            )
    return files[0].tensors[name].long()


def _read_networks(files: Sequence[File], parts: Sequence[str]) -> dict[str, Networks]:
    """Reads every network that there is, by method and seed; a method's draws are those with the fitted spread, 1."""
    found: dict[str, Networks] = {}
    for method in (*METHODS.values(), *(METHODS[key].at(spread) for key, _ in _SPREAD for spread in SPREADS)):
        for file in sorted(files, key=lambda file: file.header["seed"]):
            if f"{method.key}/test/log_probs" in file.tensors:
                network = {part: unpack(file, method.key, part) for part in parts}
                found.setdefault(method.key, {})[file.header["seed"]] = network
    for key, _ in _SPREAD:
        fitted = METHODS[key].at(1.0).key
        if fitted in found:
            found.setdefault(key, found[fitted])
    return found


def _choose(networks: dict[str, Networks], labels: Tensor) -> dict[str, Chosen]:
    """Adds what validation data choose to the networks, spreads where one is not the fitted one; returns the values."""
    chosen = {}
    for key, tuned in _SPREAD:
        by_spread = {spread: networks.get(METHODS[key].at(spread).key, {}) for spread in SPREADS}
        picked, has_end = {}, False
        for seed in by_spread[1.0]:
            tried = {spread: found[seed] for spread, found in by_spread.items() if seed in found}
            losses = {spread: log_loss(network["validation"][0], labels) for spread, network in tried.items()}
            decides = can_choose(tried[1.0]["validation"][0], labels)
            picked[seed] = choose_spread(losses) if decides else 1.0
            has_end = has_end or picked[seed] in (min(tried), max(tried))
        if any(spread != 1 for spread in picked.values()):
            networks[tuned] = {seed: by_spread[spread][seed] for seed, spread in picked.items()}
            chosen[tuned] = Chosen(tuple(picked.values()), has_end)
    if "plain" in networks:
        pairs = {seed: temper_network(network, labels) for seed, network in networks["plain"].items()}
        temperatures = tuple(temperature for _, temperature in pairs.values())
        if any(temperature != 1 for temperature in temperatures):
            tempered = METHODS["plain"].tempered().key
            networks[tempered] = {seed: network for seed, (network, _) in pairs.items()}
            chosen[tempered] = Chosen(temperatures, any(map(is_end, temperatures)))
    return chosen


def _list_rows(
    method: Method, networks: dict[str, Networks], chosen: dict[str, Chosen], validation: Tensor | None
) -> Iterator[Scored]:
    """Yields a method with its networks or ensemble, and with a temperature where it has one; nothing without files."""
    if method.members is None:
        for one in (method, method.tempered()):
            if one.key in networks:
                drawn = method.drawing.family is not None or method.drawing.dropout
                outputs = tuple(_to_output(network, several=drawn) for network in networks[one.key].values())
                words = f"{len(outputs)} seeds"
                yield Scored(one, tuple(networks[one.key]), outputs, outputs, words, chosen=chosen.get(one.key))
        return
    members = networks.get(method.members, {})
    if len(members) < 2:
        return
    each = list(members.values())
    # With one of two left out there is no ensemble.
    left_out = [each[:i] + each[i + 1 :] for i in range(len(each))] if len(each) > 2 else []
    ensembles = [{part: average([one[part] for one in some]) for part in each[0]} for some in (each, *left_out)]
    yield _score_ensemble(method, tuple(members), ensembles)
    if method.key == "ensemble" and validation is not None:
        tempered = [temper_network(ensemble, validation) for ensemble in ensembles]
        temperature = tempered[0][1]
        if temperature != 1:
            found = _score_ensemble(method.tempered(), tuple(members), [one for one, _ in tempered], several=False)
            yield replace(found, chosen=Chosen((temperature,), is_end(temperature)))


def _score_ensemble(
    method: Method, seeds: tuple[int, ...], ensembles: Sequence[Network], several: bool = True
) -> Scored:
    """Returns the first ensemble, which is whole, with the others, which leave one network out, behind its ±."""
    whole, *rest = (_to_output(ensemble, several) for ensemble in ensembles)
    words = f"the {len(rest)} ensembles of {len(rest) - 1}" if rest else ""
    return Scored(method, seeds, (whole,), tuple(rest) or (whole,), words)


def _to_output(network: Network, several: bool) -> dict[str, Output]:
    """Returns what is scored: the draws' or members' mean entropy too, if there are several of them."""
    return {part: Output(probs, h if several else None) for part, (probs, h) in network.items() if part in PARTS}


def _is_same(some: Networks, others: Networks) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(network[part][0], others[seed][part][0]) for seed, network in some.items() for part in network
    )


def _take(output: Output, index: Tensor) -> Output:
    h = output.expected_entropy
    return Output(output.probs[index], None if h is None else h[index])
