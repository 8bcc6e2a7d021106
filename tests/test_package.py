"""What the package promises as a whole: its public names, its dependencies, the direction of its imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stochbn

SOURCE = Path(stochbn.__file__).parent
ORDER = [
    "seeding",
    "batches",
    "statistics",
    "storage",
    "moments",
    "draws",
    "distributions",
    "families",
    "fitting",
    "tracking",
    "dropout",
    "uncertainty",
    "averaging",
    "sharing",
    "affine",
    "compilation",
    "engine",
    "adaptive",
    "prediction",
    "tuning",
    "exact",
]


@pytest.mark.parametrize("name", stochbn.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    documented = getattr(stochbn, name)
    assert documented.__doc__
    # The abstract class, and what functions return, are shown where they are made.
    if name not in {"StatisticsDistribution", "Fitted", "Tuning", "Prediction", "LowerBound", "Tracker"}:
        assert ">>>" in documented.__doc__


def imported(module: str) -> set[str]:
    tree = ast.parse((SOURCE / f"{module}.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        name
        for node in nodes
        for name in (
            [a.name for a in node.names] if node.module == "stochbn" else [(node.module or "").removeprefix("stochbn.")]
        )
    } & set(ORDER)


def test_imports_run_one_way() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == {*ORDER, "__init__"}
    for position, module in enumerate(ORDER):
        assert imported(module) <= set(ORDER[:position]), module


def test_core_needs_torch_safetensors_and_tqdm_only() -> None:
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in 'numpy scipy sklearn matplotlib typer rich pooch jinja2 PIL'.split():\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import stochbn\n"
        "assert not [m for m in sys.modules if m.startswith('stochbn.experiments')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
