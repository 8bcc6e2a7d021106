"""What the package promises as a whole: its public names, its dependencies, the direction of its imports."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import stochbn

SOURCE = Path(stochbn.__file__).parent
TESTS = Path(__file__).parent
# Each may import what stands above it, and a room's own modules in the order that is given for it.
ROOMS = {
    "statistics": [
        *("checks", "items", "calls", "mini_batches", "layers", "moments", "normalization", "restoring", "twin"),
        *("progress", "parts"),
    ],
    "distributions": [
        *("storage", "seeds", "draws", "tuning", "base", "factorized", "lowrank", "empirical", "files", "mistakes"),
        *("collected", "fit", "track"),
    ],
    "uncertainty": None,
    "inference.engine": [
        *("affine", "dropout", "sampling", "code", "captured", "identity", "stacking", "folding", "graph"),
        *("verification", "network"),
    ],
    "inference": ["prediction", "adaptive", "predict", "export", "held_out", "choosing", "tune", "exact"],
    "distributed": ["ranks", "agreement", "functions"],
    "decisions": None,
    "curves": None,
    "plots": None,
    "pages": ["figures", "page"],
    "assessment": ["scores", "measure", "results", "verdict", "page", "assess"],
    "cli.console": None,
    "cli.loading": None,
    "ray": None,
    "experiments.schema": None,
    "experiments.contents": None,
    "testing": ["references", "fingerprint", "checks", "suite"],
    "experiments.data": ["sources", "publications", "embedded", "splits", "corruptions"],
    "experiments.training": ["networks", "recipes", "checkpoints", "parallel", "train"],
    "experiments.methods": None,
    "experiments.files": None,
    "experiments.evaluation": ["protocols", "inference", "diagnostics", "jobs", "evaluate", "plan", "queue"],
    "experiments.report": [
        *("scores", "choose", "collect", "paper", "differences", "tables", "figures", "diagnostic_figures"),
        *("notes", "report"),
    ],
    "experiments.study": ["draws", "results", "scores", "evidence", "measure", "tables", "figures", "study"],
    "play": ["strokes", "panel", "server"],
    "cli": [
        *("job", "options", "names", "outputs", "ray"),
        *("models", "assess", "predict", "experiments", "play", "commands", "main"),
    ],
    "__main__": None,
}
ORDER = [f"{room}.{module}" if modules else room for room, modules in ROOMS.items() for module in modules or [""]]


@pytest.mark.parametrize("name", stochbn.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    documented = getattr(stochbn, name)
    assert documented.__doc__
    # The abstract class, and what functions return, are shown where they are made.
    if name not in {
        *("Distribution", "Score", "Tuning", "Prediction", "LowerBound", "Tracker", "AbstainRule", "FlagRule"),
        "Assessment",
    }:
        assert ">>>" in documented.__doc__


@cache
def imported(module: str) -> frozenset[str]:
    """Finds which modules of the package one of them imports, within functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name.removeprefix("stochbn.") for name in names) & frozenset(ORDER)


def test_every_module_stands_in_a_room() -> None:
    found = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    assert {name for name in found if not name.endswith("__init__")} == set(ORDER)


# A distribution's `save` is a method, and its format stands in one file with its reader, which knows every family.
# So is an assessment's, and its page needs what the core does not.
LATER = {
    "distributions.base": {"distributions.files"},
    "assessment.results": {"assessment.page"},
}


@pytest.mark.parametrize("module", [name for name in ORDER if name != "__main__"])
def test_every_module_has_its_test(module: str) -> None:
    room, _, name = module.rpartition(".")
    assert (TESTS / room.replace(".", "/") / f"test_{name}.py").exists()


@pytest.mark.parametrize("module", ORDER)
def test_imports_run_one_way(module: str) -> None:
    assert imported(module) - LATER.get(module, set()) <= set(ORDER[: ORDER.index(module)])


def test_the_report_needs_files_and_no_networks() -> None:
    reached: set[str] = set()
    left = {"experiments.report.report"}
    while left:
        reached |= left
        left = set().union(*map(imported, left)) - reached
    assert not [name for name in reached if name.startswith("experiments.evaluation")]
    assert not reached & {"experiments.training.checkpoints", "experiments.training.train"}


def test_core_needs_torch_safetensors_and_tqdm_only() -> None:
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        extras = 'numpy scipy sklearn matplotlib typer rich pooch jinja2 PIL onnx onnxscript onnxruntime'\n"
        "        extras += ' pandas pyarrow ray'\n"
        "        if name.split('.')[0] in extras.split():\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import stochbn\n"
        "rooms = 'stochbn.experiments', 'stochbn.cli', 'stochbn.play', 'stochbn.testing'\n"
        "assert not [m for m in sys.modules if m.startswith(rooms)]\n"
        "import stochbn.testing\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
