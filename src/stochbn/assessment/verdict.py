"""Numbers of an assessment → what they mean, in sentences. Pure functions."""

import math
from collections.abc import Iterator

from stochbn.assessment.results import Assessment, Method
from stochbn.assessment.scores import Estimate
from stochbn.distributions.mistakes import MAX_LOG_RATIO, MAX_SHIFT
from stochbn.inference.choosing import FEWEST_MISTAKES


def describe(found: Assessment) -> Iterator[str]:
    """Yields what was found, the most important first."""
    chosen = found.methods[found.chosen]
    yield _say_quality(found, chosen)
    yield _say_gain(found, chosen)
    if chosen.found is not None:
        area = chosen.scores["auroc"]
        yield (
            f"Of the out-of-domain inputs {_percent(chosen.found)} are more uncertain than 95 % of the known ones; the "
            f"AUROC is {_number(area, 3)}."
            f"{' The network is surer of them than of known inputs.' if area.high < 0.5 else ''}"
        )
    if drifted := _find_drifted(found):
        yield (
            f"The {' and '.join(drifted)} data do not look like what the network was trained on: their batch "
            "statistics drift."
        )
    if "validation" not in found.num_inputs and "given-tuned" in found.methods:
        yield "The given tuning was taken as it is: without validation data nothing was compared with it."
    elif "validation" not in found.num_inputs:
        yield (
            "Without validation data nothing could be chosen: no temperature"
            f"{', no noise level' if found.link == 'identity' else ''} and no method, so what was fitted stands."
        )


def _say_quality(found: Assessment, chosen: Method) -> str:
    """Says how good the network is, and how much of its work it may do alone."""
    count = f"{found.num_inputs['test']:,} test inputs"
    if found.link == "identity":
        said = f"On {count} the error has a root mean square of {_number(chosen.scores['rmse'], 4)}"
        if "coverage_percent" in chosen.scores:
            said += f", and 95 % intervals hold {_percent(chosen.scores['coverage_percent'])} of the labels"
        return f"{said}."
    error = _percent(chosen.scores["error_percent"])
    if found.rule is None:
        places = "pixels" if found.link == "softmax" else "labels"
        return f"On {count} the network is wrong on {error} of the {places}."
    rule = found.rule
    wrong = f"it is wrong on {error} of {count}"
    if not rule.num_accepted:
        return f"No threshold could be shown to keep the error below {100 * rule.risk:g} %. Over all {wrong}."
    whole = "all" if rule.num_accepted == rule.num_inputs else f"{100 * rule.coverage:.0f} %"
    return (
        f"With {100 * rule.confidence:.0f} % confidence, “{chosen.label}” makes at most {100 * rule.risk:g} % errors "
        f"on the inputs it accepts, which were {whole} of the test inputs. Over all {wrong}."
    )


def _say_gain(found: Assessment, chosen: Method) -> str:
    """Says what the chosen method adds to the plain network."""
    if found.chosen == "plain":
        if found.has_few_mistakes:
            return (
                f"The plain network stands: it makes {found.num_mistakes} mistakes on the validation data, and fewer "
                f"than {FEWEST_MISTAKES} can choose nothing but by chance."
            )
        return (
            "On validation data nothing predicts distinguishably better than the plain network: on known inputs draws "
            "do not improve it."
        )
    by = "Chosen on validation data" if "validation" in found.num_inputs else "Taken without a choice"
    cost = "at no extra time" if chosen.cost == 1 else f"at {chosen.cost:.2g} times the plain network's time"
    if "nll" in chosen.differences:
        change, after = chosen.differences["nll"], chosen.scores["nll"]
        size = f"{abs(change.value):.4f} {'lower' if change.value < 0 else 'higher'} than the plain network's"
        sure = "" if change.excludes_zero else ", which may be chance"
        return f"{by}: “{chosen.label}”. Its NLL on the test data is {_number(after, 4)}, {size}{sure}, {cost}."
    return f"{by}: “{chosen.label}”, {cost}."


def _find_drifted(found: Assessment) -> list[str]:
    """Lists the data sets with a layer whose statistics are further from the running ones than `fit` warns of."""
    return [
        name
        for name, layers in found.drift.items()
        if any(shift > MAX_SHIFT or ratio > MAX_LOG_RATIO for shift, ratio in layers.values())
    ]


def _percent(estimate: Estimate) -> str:
    """Writes a share in percent.

    Examples:
        >>> _percent(Estimate(5.25, 4.0, 7.0))
        '5.2 % (4.0 to 7.0)'
    """
    digits = 1 if math.isnan(estimate.value) or max(estimate.high, estimate.value) >= 1 else 2
    return f"{estimate.value:.{digits}f} % ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _number(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"
