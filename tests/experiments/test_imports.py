"""What the experiments promise as a whole: imports run one way, and stages meet only through files."""

import ast
from pathlib import Path

import stochbn

SOURCE = Path(stochbn.__file__).parent
ORDER = [
    "sources",
    "publications",
    "embedded",
    "data",
    "corruptions",
    "networks",
    "recipes",
    "checkpoints",
    "train",
    "predictions",
    "inference",
    "diagnostics",
    "evaluate",
    "study",
    "scores",
    "paper",
    "claims",
    "tables",
    "figures",
    "diagnostic_figures",
    "report",
    "study_scores",
    "study_evidence",
    "study_results",
    "study_figures",
    "study_report",
    "custom",
    "cli",
]


def imported(path: Path) -> set[str]:
    """Finds all that a file imports, within functions too; `from a import b` counts as `a` and as `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def needed(module: str) -> set[str]:
    """Finds which modules of the experiments one of them imports."""
    names = imported(SOURCE / "experiments" / f"{module}.py")
    return {name for name in ORDER if f"stochbn.experiments.{name}" in names}


def test_imports_run_one_way() -> None:
    assert {path.stem for path in (SOURCE / "experiments").rglob("*.py")} == {*ORDER, "__init__"}
    for position, module in enumerate(ORDER):
        assert needed(module) <= set(ORDER[:position]), module


def test_the_core_never_imports_the_experiments() -> None:
    for path in SOURCE.glob("*.py"):
        assert not [name for name in imported(path) if name.startswith("stochbn.experiments")], path.name


def test_the_report_needs_files_and_no_networks() -> None:
    reached, left = set(), {"report"}
    while left:
        reached |= left
        left = set().union(*map(needed, left)) - reached
    assert not reached & {"checkpoints", "train", "inference", "diagnostics", "evaluate"}
