"""The study of an experiment, from trained networks to tables and figures."""

from pathlib import Path

from rich.console import Console

from stochbn.experiments.data.sources import write_atomically
from stochbn.experiments.study.draws import Sizes, Study
from stochbn.experiments.study.figures import draw_figures
from stochbn.experiments.study.measure import measure_study
from stochbn.experiments.study.results import Results
from stochbn.experiments.study.tables import describe
from stochbn.experiments.training.recipes import Experiment
from stochbn.pages.figures import render


def run_study(
    experiment: Experiment,
    folder: Path,
    *,
    num_samples: int = 50,
    data: Path | None = None,
    compiles: bool = False,
    console: Console | None = None,
) -> Path:
    """Draws what is missing in the cache, scores it, and writes `study.json`, `study.md` and `figures/` into a folder.

    Arguments are those of `evaluate`; `compiles` says whether predictions are compiled. Returns the path of the tables.

    Raises:
        CheckpointError: No network of the experiment has been trained.
    """
    console = console or Console()
    study = Study(experiment, Sizes(num_samples=num_samples), data=data, compiles=compiles, console=console)
    study.draw()
    return write_study(measure_study(study, study.read()), folder, console)


def write_study(results: Results, folder: Path, console: Console) -> Path:
    """Writes numbers, tables and figures; returns the path of the tables."""
    results.write(folder / "study.json")
    text = describe(results)
    write_atomically(folder / "study.md", text.encode())
    for name, figure in draw_figures(results).items():
        for ending, content in render(figure).items():
            write_atomically(folder / "figures" / f"{name}.{ending}", content)
    console.print(text, highlight=False, markup=False)
    return folder / "study.md"
