"""Predictive uncertainty for any batch-normalised PyTorch network, without retraining it.

stats = stochbn.fit(model, train_loader)
pred = stochbn.predict(model, stats, x)
pred.probs, pred.entropy
"""

from stochbn import distributed as distributed
from stochbn.assessment.assess import assess
from stochbn.assessment.results import Assessment
from stochbn.decisions import AbstainRule, FlagRule, abstain, flag, load_rule
from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.distributions.empirical import Empirical
from stochbn.distributions.factorized import Factorized
from stochbn.distributions.files import load
from stochbn.distributions.fit import fit
from stochbn.distributions.lowrank import LowRank
from stochbn.distributions.track import Tracker, track
from stochbn.distributions.tuning import Score, Tuning
from stochbn.inference.exact import LowerBound, exact_predict, lower_bound
from stochbn.inference.export import export
from stochbn.inference.predict import Predictor, predict
from stochbn.inference.prediction import Prediction
from stochbn.inference.tune import tune
from stochbn.uncertainty import (
    aurc,
    brier,
    ece,
    entropy,
    error,
    expected_entropy,
    fpr95,
    mutual_information,
    nll,
)

__version__ = "0.1.0"

__all__ = [
    "AbstainRule",
    "Assessment",
    "Distribution",
    "Draws",
    "Empirical",
    "Factorized",
    "FlagRule",
    "LowRank",
    "LowerBound",
    "Prediction",
    "Predictor",
    "Score",
    "Tracker",
    "Tuning",
    "abstain",
    "assess",
    "aurc",
    "brier",
    "ece",
    "entropy",
    "error",
    "exact_predict",
    "expected_entropy",
    "export",
    "fit",
    "flag",
    "fpr95",
    "load",
    "load_rule",
    "lower_bound",
    "mutual_information",
    "nll",
    "predict",
    "track",
    "tune",
]
