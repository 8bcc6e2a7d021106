"""Predictive uncertainty for any batch-normalised PyTorch network, without retraining it.

stats = stochbn.fit(model, train_loader)
pred = stochbn.predict(model, stats, x)
pred.probs, pred.entropy
"""

from stochbn.averaging import Prediction
from stochbn.distributions import Factorized, Fitted, StatisticsDistribution, Tuning
from stochbn.draws import Draws
from stochbn.exact import LowerBound, exact_predict, lower_bound
from stochbn.families import Empirical, LowRank, load
from stochbn.fitting import fit
from stochbn.prediction import predict
from stochbn.tracking import Tracker, track
from stochbn.tuning import tune
from stochbn.uncertainty import brier, ece, entropy, error, expected_entropy, mutual_information, nll

__version__ = "0.1.0"

__all__ = [
    "Draws",
    "Empirical",
    "Factorized",
    "Fitted",
    "LowRank",
    "LowerBound",
    "Prediction",
    "StatisticsDistribution",
    "Tracker",
    "Tuning",
    "brier",
    "ece",
    "entropy",
    "error",
    "exact_predict",
    "expected_entropy",
    "fit",
    "load",
    "lower_bound",
    "mutual_information",
    "nll",
    "predict",
    "track",
    "tune",
]
