"""Peak memory of `predict(keep_samples=False)` against S, each in a process of its own.

`python -m benchmarks.memory NETWORK N S` is that process. On Linux the peak is the kernel's high-water mark, set back
after a plain pass: `ru_maxrss` is inherited from the process that starts this one, and would show the benchmark's peak.
"""

import gc
import json
import resource
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

import stochbn
from benchmarks.subjects import Subject

ROOT = Path(__file__).parent.parent
STATUS = Path("/proc/self/status")
CASES = (("lenet5", 16), ("vgg11", 16), ("resnet18", 1))  # network and N
SAMPLES = (10, 100, 1000)


def measure_apart(network: str, num_rows: int, num_samples: int) -> dict[str, int]:
    """Runs this module in a fresh process and returns what it printed: bytes before `predict` and at its peak."""
    command = [sys.executable, "-m", "benchmarks.memory", network, str(num_rows), str(num_samples)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Expected the memory of {network} to be measured, got {done.stderr.strip()[-500:]}.")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def measure_here(network: str, num_rows: int, num_samples: int) -> dict[str, int]:
    """Predicts once, and returns bytes before and at the peak."""
    subject = Subject(network)
    x = subject.images(num_rows)
    with torch.inference_mode():
        subject.model(x)
    gc.collect()
    before = _restart_peak()
    stochbn.predict(subject.model, subject.stats, x, num_samples=num_samples, keep_samples=False)
    return {"before": before, "peak": max(before, _peak())}  # the kernel counts a little late


def _restart_peak() -> int:
    """Sets the peak back to what is in use now, where that can be done; returns it."""
    with suppress(OSError):  # where it cannot, the peak so far stands, and growth is a lower bound
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
