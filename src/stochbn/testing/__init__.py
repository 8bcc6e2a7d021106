"""A conformance suite for networks of your own: what the package promises, against naive ways to the same numbers."""

from stochbn.testing.references import hooked_statistics, naive_outputs
from stochbn.testing.suite import CheckError, Report, check_model

__all__ = ["CheckError", "Report", "check_model", "hooked_statistics", "naive_outputs"]
