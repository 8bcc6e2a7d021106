"""A user's folder, and ways to run commands in it."""

import runpy
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stochbn.cli.main import main

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

def build():
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5),
        nn.BatchNorm1d(5, momentum=None), nn.ReLU(), nn.Linear(5, 3),
    )

def pixels():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))

class Branching(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

def branching():
    return Branching(*build())

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 4))

network = build()
number = 3
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
stream = Stream()

nothing = x[:0]
wide = torch.ones(64, 5)

def tensor():
    return x

def loader():
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)

def shuffled():
    return DataLoader(TensorDataset(x), batch_size=16, shuffle=True)

def fails():
    raise RuntimeError("no luck")
"""
NEEDED = {
    "fit": {"data": "data.npz", "batch_size": 16, "out": "net.sbn.safetensors"},
    "tune": {"stats": "net.sbn.safetensors", "data": "data.npz", "out": "tuned.sbn.safetensors"},
    "predict": {"data": "data.npz", "out": "pred.csv"},
    "assess": {"train": "data.npz", "batch_size": 16, "test": "test.npz", "out": "assessment"},
    "export": {"data": "data.npz", "out": "net.onnx"},
}


@pytest.fixture(autouse=True)
def _workspace(tmp_path, monkeypatch):
    """An empty folder to work in, with an empty cache and no network."""
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was touched"))


@pytest.fixture(scope="session")
def write_own():
    """Writes a user's module, its weights and data into a folder; returns what the module defines, and the model."""

    def write(folder: Path):
        (folder / "own_nets.py").write_text(OWN)
        module = runpy.run_path(folder / "own_nets.py")
        model, x = module["build"](), module["x"]
        for batch in x.split(16):  # running statistics as after training
            model(batch)
        torch.save(model.state_dict(), folder / "model.pt")
        for name in ("data.npz", "test.npz"):
            np.savez(folder / name, x=x.double().numpy(), y=(x[:, 0] > 0).numpy().astype(np.uint8))
        return {**module, "model": model.eval()}

    return write


@pytest.fixture
def own(write_own, tmp_path):
    """A user's module, its weights and data in the current folder."""
    yield write_own(tmp_path)
    sys.modules.pop("own_nets", None)


@pytest.fixture
def run(capsys):
    """Runs the command in this process; returns exit code, stdout and stderr.

    The commands for a network of one's own are given what they need, if that is wanted. An option that is None is left
    out, and a list repeats one.
    """

    def run(*words, needed=True, **options):
        if needed and words and words[0] in NEEDED:
            options = {"factory": "own_nets:build", "checkpoint": "model.pt", **NEEDED[words[0]], **options}
            words = (words[0], options.pop("factory"), *words[1:])
        given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
        pairs = [(name, each) for name, v in given.items() for each in (v if isinstance(v, list) else [v])]
        with pytest.raises(SystemExit) as ended:
            main([*words, *(name if value is True else f"{name}={value}" for name, value in pairs)])
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Runs a command that has to end in one line on stderr with exit code 2; returns the line."""

    def refused(*words, **options):
        code, _, stderr = run(*words, **options)
        assert code == 2
        assert stderr.count("\n") == 1
        assert stderr.startswith("Error: ")
        return stderr

    return refused
