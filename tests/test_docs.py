"""The README's code runs as it stands."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from oracles import calibrate, small_cnn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.filterwarnings("ignore::UserWarning:tqdm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, within the compiler
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")  # the labels are noise
def test_readme_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    data = TensorDataset(torch.rand(192, 1, 8, 8), torch.randint(3, (192,)))
    train_loader = DataLoader(data, batch_size=16, shuffle=True)
    models = [calibrate(small_cnn(dropout=0.2), data.tensors[0].split(16)) for _ in range(2)]
    names = {
        "model": models[0],
        "models": models,
        "train_loader": train_loader,
        "val_loader": train_loader,
        "test_loader": train_loader,
        "x": torch.rand(4, 1, 8, 8),
    }
    for block in blocks:
        # Compiling needs a C++ compiler, which a machine may lack.
        exec(block if shutil.which("g++") else block.replace("compile=True", "compile=False"), names)
    assert names["pred"].probs.shape == (4, 3)
    assert (tmp_path / "net.sbn.safetensors").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_names_in_the_method_page_exist() -> None:
    import stochbn
    from stochbn.distributions import base as distributions
    from stochbn.distributions import draws
    from stochbn.inference import exact
    from stochbn.inference import prediction as averaging
    from stochbn.statistics import batches, moments
    from stochbn.statistics import normalization as statistics

    rooms = (stochbn, averaging, batches, distributions, draws, exact, moments, statistics)
    text = (ROOT / "docs" / "method.md").read_text().split("## What we decided")[0]
    found = re.findall(r"`(?:[a-z]+\.)?([A-Za-z_]{3,})(?:\.([a-z_]+))?[`(\[]", text)
    missing = [name for name, _ in found if not any(hasattr(room, name) for room in rooms)]
    assert len(found) > 10
    assert missing in ([], ["running_mean", "running_var"])
