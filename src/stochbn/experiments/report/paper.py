"""The numbers that the paper prints, set beside ours."""

from dataclasses import dataclass

from stochbn.experiments.report.scores import Scores

# Table 1 as printed: error in % and NLL, each with its ±; then the median out-of-domain entropy, read off the plots.
_PAPER: dict[str, dict[str, tuple[float, float, float, float, float]]] = {
    "lenet5": {
        "SBN": (0.53, 0.05, 0.025, 0.003, 0.03),
        "Deep Ensembles": (0.43, 0.0, 0.015, 0.001, 0.56),
        "Deep Ensembles + SBN": (0.43, 0.0, 0.014, 0.001, 0.58),
        "Dropout": (0.51, 0.0, 0.016, 0.0, 0.68),
        "Dropout + SBN": (0.49, 0.0, 0.015, 0.0, 0.70),
    },
    "vgg11": {
        "SBN": (5.76, 0.0, 0.302, 0.002, 0.02),
        "Deep Ensembles": (5.18, 0.0, 0.177, 0.004, 0.22),
        "Deep Ensembles + SBN": (5.23, 0.0, 0.154, 0.002, 0.27),
        "Dropout": (5.32, 0.0, 0.155, 0.001, 0.25),
        "Dropout + SBN": (5.38, 0.0, 0.149, 0.001, 0.38),
    },
    "resnet18": {
        "SBN": (4.35, 0.17, 0.255, 0.018, 0.00),
        "Deep Ensembles": (3.37, 0.0, 0.138, 0.005, 0.17),
        "Deep Ensembles + SBN": (3.34, 0.0, 0.110, 0.004, 0.27),
    },
}
# The paper's rounding, and how well its plots can be read.
_HALF_DIGIT = {"error_percent": 0.005, "nll": 0.0005, "entropy_out_of_domain": 0.02}


@dataclass(frozen=True)
class PaperScore:
    """A number of the paper, its ± if it is printed, and in words where ours lies."""

    value: float
    std: float | None
    verdict: str


Papers = dict[str, dict[str, PaperScore]]  # by method and metric


def compare(experiment: str, scores: Scores) -> Papers:
    """Sets the paper's numbers beside ours: by method and metric; empty where the paper has none.

    Ours is within the paper's ± if it is so after rounding as the paper does.

    Example:
        >>> from stochbn.experiments.report.scores import Score
        >>> compare("lenet5", {"SBN": {"nll": Score(0.0213, None, 10_000)}})["SBN"]["nll"].verdict
        '0.004 lower'
    """
    table: Papers = {}
    for name, (errors, errors_std, nlls, nlls_std, median) in _PAPER.get(experiment, {}).items():
        printed = {
            "error_percent": (errors, errors_std),
            "nll": (nlls, nlls_std),
            "entropy_out_of_domain": (median, None),
        }
        for key, (value, std) in printed.items():
            if key in scores.get(name, {}):
                difference = scores[name][key].value - value
                within = abs(difference) <= (std or 0) + _HALF_DIGIT[key]
                digits = 3 if key == "nll" else 2
                verdict = f"{abs(difference):.{digits}f} {'lower' if difference < 0 else 'higher'}"
                if within:
                    verdict = "the same" if std is None else "within ±"
                table.setdefault(name, {})[key] = PaperScore(value, std, verdict)
    return table
