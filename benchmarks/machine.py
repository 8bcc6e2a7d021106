"""What the numbers were made with: processor, versions, commit, date."""

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stochbn.experiments.files import commit

PACKAGES = ("stochbn", "torch", "numpy", "transformers", "laplace-torch")


def describe(command: str) -> dict[str, Any]:
    """Returns what a reader needs to run the same again, without any path or host name."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__)),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def _version(package: str) -> str:
    try:
        return torch.__version__ if package == "torch" else version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
