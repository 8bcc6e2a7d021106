"""The pages' code runs as it stands, their links lead somewhere, and their names and numbers are the package's own."""

import importlib.util
import json
import logging
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from torch.utils.data import DataLoader, TensorDataset

import stochbn
import stochbn.testing
from docs import picture
from oracles import calibrate, small_cnn
from stochbn import plots

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def run(page: Path, names: dict[str, Any]) -> int:
    """Executes a page's Python in order, in one namespace. Returns how many blocks there were."""
    blocks = python_blocks(page)
    for block in blocks:
        if "from mapie" in block and not importlib.util.find_spec("mapie"):
            continue  # no dependency of ours: its block runs where it is installed
        if not shutil.which("g++"):  # compiling needs a C++ compiler, which a machine may lack
            block = block.replace("compile=True", "compile=False")
            block = block.replace(
                'torch._inductor.aoti_load_package("net.pt2")', 'torch.export.load("net.pt2").module()'
            )
        exec(block, names)
    return len(blocks)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What README and guide take for granted: trained models, loaders and inputs."""
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.rand(192, 1, 8, 8), torch.randint(3, (192,)))
    train, val, test = (DataLoader(data, batch_size=16, shuffle=True) for _ in range(3))
    models = [calibrate(small_cnn(dropout), data.tensors[0].split(16)) for dropout in (0.0, 0.0, 0.2)]
    return {
        "model": models[0],
        "models": models[:2],
        "dropout_model": models[2],
        "train_loader": train,
        "val_loader": val,
        "test_loader": test,
        "other_loader": [3 + torch.rand(16, 1, 8, 8) for _ in range(2)],
        "held_out_x": torch.rand(200, 1, 8, 8),
        "held_out_y": torch.randint(3, (200,)),
        "reg_loader": [(x, models[0](x).detach() + torch.randn(16, 3)) for x in data.tensors[0].split(16)],
        "x": torch.rand(4, 1, 8, 8),
    }


@pytest.mark.filterwarnings("ignore::UserWarning:tqdm")
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")  # the labels are noise
@pytest.mark.filterwarnings("ignore:No threshold is shown to keep")
def test_readme_code(given: dict[str, Any]) -> None:
    assert run(ROOT / "README.md", given) == 2
    assert given["accept"].coverage == 0, "labels that are noise prove nothing"
    assert given["answered"].tolist() == [False] * 4
    assert given["pred"].probs.shape == (4, 3)
    assert list(given["stats"].layers) == ["7"]
    assert given["stats"].tuning is not None


@pytest.mark.filterwarnings("ignore::UserWarning:tqdm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, within the compiler
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
@pytest.mark.filterwarnings("ignore:No threshold is shown to keep")
def test_guide_code(given: dict[str, Any]) -> None:
    assert run(DOCS / "guide.md", given) == 16
    assert Path("assessment/index.html").exists()
    assert given["left"].get_xlabel() == "Confidence"
    assert not given["accept"](given["new"]).any(), "labels that are noise prove nothing"
    assert given["flag"](given["held_out"]).sum() == 9  # the tenth place is the new input's
    assert given["flagged"].shape == (4,)
    assert given["tuning"].temperature > 1, "labels that are noise want a high temperature"
    assert len(given["all_stats"]) == 2
    assert given["pred"].link == "identity"
    assert given["pred"].total_std.min() >= given["pred"].noise > 0
    assert Path("net.sbn.safetensors").exists()


@pytest.mark.filterwarnings("ignore::UserWarning:tqdm")
def test_tutorial_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert run(DOCS / "tutorial.md", names) == 11
    y, plain, pred, unknown = (names[name] for name in ("y", "plain", "pred", "unknown"))
    assert stochbn.ece(pred.probs, y) < stochbn.ece(plain.probs, y) / 2
    assert stochbn.nll(pred.probs, y) < stochbn.nll(plain.probs, y)
    assert unknown.entropy.median() > 2 * pred.entropy.median()
    assert unknown.epistemic.median() > 2 * pred.epistemic.median()
    answered, wrong = names["answered"], pred.probs.argmax(1) != y
    flag, accept = names["flag"], names["accept"]
    assert 0.7 < accept.coverage < 0.8
    # Two standard errors, over 2,000 held-out and 1,600 test waves; for the rate of flags below too.
    assert answered.float().mean() == pytest.approx(accept.coverage, abs=2 * (0.19 / 2000 + 0.19 / 1600) ** 0.5)
    assert wrong[answered].float().mean() <= 0.03
    assert wrong[~answered].float().mean() > 0.2
    assert flag(pred).float().mean() == pytest.approx(0.05, abs=2 * (0.05 / 2000 + 0.05 / 1600) ** 0.5)
    assert flag(unknown).float().mean() > 0.2
    assert accept(unknown).float().mean() < 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:tqdm")
def test_serving_code(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stochbn")  # which the page changes; afterwards it is put back
    caplog.handler.setLevel(logging.NOTSET)
    x = given["x"]
    np.save("x.npy", x.numpy())
    assert run(DOCS / "serving.md", given) == 7
    expected = stochbn.predict(given["model"], given["stats"], x, num_samples=256)
    for prediction in (given["pred"], given["again"](x)):
        torch.testing.assert_close(prediction.probs, expected.probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(given["probs"], expected.probs, rtol=0, atol=1e-5)  # from the last file, .pt2
    assert "Sequential is not captured: it has forward hooks" in caplog.text
    ask_in_threads(given)
    np.testing.assert_allclose(run_without_torch(), expected.probs.numpy(), rtol=0, atol=1e-5)


def ask_in_threads(served: dict[str, Any]) -> None:
    """Asks the page's web service from 8 threads at once, and compares with what one thread computes."""
    batches = [torch.rand(1 + number % 3, 1, 8, 8) for number in range(32)]
    expected = [served["predictor"](batch) for batch in batches]
    with TestClient(served["app"]) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda batch: client.post("/predict", json=batch.tolist()), batches))
        assert client.post("/predict", json=torch.rand(1, 1, 9, 9).tolist()).status_code == 422
    for answer, pred in zip(answers, expected, strict=True):
        assert answer.status_code == 200
        assert answer.json()["label"] == pred.probs.argmax(1).tolist()
        assert answer.json()["confidence"] == pytest.approx(pred.probs.max(1).values.tolist(), rel=1e-6)
        assert answer.json()["entropy"] == pytest.approx(pred.entropy.tolist(), rel=1e-6)


def run_without_torch() -> np.ndarray:
    """Runs the page's block for ONNX Runtime where neither torch nor this package is; returns probabilities."""
    (block,) = (block for block in python_blocks(DOCS / "serving.md") if "import onnxruntime" in block)
    script = "import sys\nsys.modules |= {'torch': None, 'stochbn': None}\n" + block + "np.save('probs.npy', probs)\n"
    output = subprocess.run([sys.executable, "-c", script], check=True, timeout=300, capture_output=True, text=True)
    assert "'num_samples': '256'" in output.stdout
    return np.load("probs.npy")


@pytest.mark.filterwarnings("ignore::UserWarning")  # the labels are random
def test_scale_code(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert run(DOCS / "scale.md", given) == 1
    assert stochbn.load("net.sbn.safetensors").num_batches == given["stats"].num_batches
    assert len(given["pred"]) == len(given["test_loader"].dataset)


def test_all_python_is_run() -> None:
    with_python = {page.name for page in PAGES if "```python" in page.read_text()}
    assert with_python == {"README.md", "guide.md", "scale.md", "serving.md", "tutorial.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_names_in_the_method_page_exist() -> None:
    rooms = ("distributions", "inference", "statistics")
    found = pkgutil.walk_packages(stochbn.__path__, "stochbn.")
    modules = [stochbn, *(importlib.import_module(m.name) for m in found if m.name.split(".")[1] in rooms)]
    text = (DOCS / "method.md").read_text().split("## What we decided")[0]
    names = re.findall(r"`(?:[a-z_]+\.)?([A-Za-z_]{3,})(?:\.([a-z_]+))?[`(\[]", text)
    missing = {name for name, _ in names if not any(hasattr(module, name) for module in modules)}
    assert len(names) > 10
    assert missing == {"running_mean", "running_var"}  # buffers of torch's layers


def test_the_api_page_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: stochbn\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    rooms = {"distributed": stochbn.distributed, "testing": stochbn.testing, "plots": plots}
    others = [f"{room}.{name}" for room, module in rooms.items() for name in module.__all__]
    assert sorted(shown) == sorted([*stochbn.__all__, *others, "ray.BatchPredictor"])


def test_examples_stand_in_a_section_that_the_site_knows() -> None:
    documented = {name: getattr(stochbn, name).__doc__ for name in stochbn.__all__}
    unknown = [name for name, text in documented.items() if re.search(r"^ *Example:$", text, re.MULTILINE)]
    assert not unknown, "Write Examples: the parser of the site takes the singular for a remark."


def test_the_tree_in_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text().split("## The tree")[1]
    tree = re.search(r"```text\nsrc/stochbn/\n(.*?)```", text, re.DOTALL)
    assert tree
    rooms = re.findall(r"^  (\S+)", tree[1], re.MULTILINE)
    others = re.findall(r"^(\S+)", tree[1], re.MULTILINE)
    package = ROOT / "src" / "stochbn"
    there = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert set(rooms) == there
    assert all((ROOT / name).is_dir() for name in others)
    named = re.findall(r"`(\w+\.py)`", text)
    assert named
    assert all(any(package.rglob(name)) for name in named)


def test_readme_numbers_are_those_of_the_study() -> None:
    study = json.loads((ROOT / "results/beyond/lenet5/study.json").read_text())
    text = (ROOT / "README.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[2:-1]] for row in re.findall(r"^\|.*±.*\|$", text, re.MULTILINE)]
    columns = [("error_percent", 1, 2), ("nll", 1, 4), ("ece", 100, 2), ("auroc_entropy", 1, 3)]
    columns += [("fpr95_entropy", 100, 1)]
    for cells, (method, quality, *_) in zip(rows, picture.ROWS, strict=True):
        scores = study["methods"][method][quality]["scores"]
        expected = [
            f"{factor * scores[key]['value']:.{digits}f} ± {factor * scores[key]['std']:.{digits}f}"
            for key, factor, digits in columns
        ]
        assert cells == expected
    [against] = [one for one in study["differences"] if (one["first"], one["second"]) == ("last-tuned", "ensemble")]
    for name, key in (("NLL", "nll"), ("AUROC", "auroc_entropy"), ("Brier score", "brier")):
        found = against["scores"][key]
        numbers = [f"{found[end]:+.4f}".replace("-", "−") for end in ("difference", "low", "high")]
        assert "{} {} ({} to {})".format(name, *numbers) in text


def test_the_picture_is_drawn_from_committed_results(tmp_path: Path) -> None:
    picture.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
