"""`--ray` on a cluster of two nodes: the library's numbers, none twice, whatever dies meanwhile."""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from rich.console import Console

import stochbn
from stochbn.cli.ray import call_on_images, find_cause, predict_files
from stochbn.experiments.evaluation.queue import reproduce
from stochbn.experiments.files import File, prediction_path
from stochbn.experiments.training.checkpoints import checkpoint_path, find_checkpoint, read_checkpoint
from stochbn.experiments.training.recipes import EXPERIMENTS, Experiment
from tiny import PLAIN, measure_little

# Ray's own, about options of its own.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]

NETS = """
import os, sys
import torch
from torch import nn

def build():
    ray = sys.modules.get("ray")
    if ray and ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        with open(os.path.join(os.path.dirname(__file__), "built"), "a") as log:
            log.write(ray.get_runtime_context().get_node_id() + "\\n")
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
"""
NUM_INPUTS = 600
SAMPLES = 5000  # which take a while
NAMES = ["class", "confidence", "entropy", "aleatoric", "epistemic", "probabilities"]


@pytest.fixture(autouse=True)
def _workspace(tmp_path, monkeypatch):
    """An empty folder to work in, and an empty cache. Unlike elsewhere there are connections, on this machine."""
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a core each, and this one, which starts and watches the work and has none for it."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # or workers wait for all other tests
    from ray.cluster_utils import Cluster

    node = {"object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **node)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def network(tmp_path):
    """A user's module, weights and statistics in the current folder, and Parquet files; returns model and inputs."""
    (tmp_path / "ray_nets.py").write_text(NETS)
    names = {"__file__": str(tmp_path / "ray_nets.py")}
    exec(NETS, names)
    model, x = names["build"](), torch.rand(NUM_INPUTS, 1, 8, 8)
    for batch in x.split(50):
        model(batch)
    torch.save(model.eval().state_dict(), "net.pt")
    stochbn.fit(model, list(x.split(50)), progress=False).save("net.sbn.safetensors")
    Path("data").mkdir()
    for number, part in enumerate(x.split(30)):
        ids = np.arange(30) + 30 * number
        table = pyarrow.table({"id": ids, "x": part.double().numpy().tolist(), "unused": ids})
        parquet.write_table(table, f"data/{number}.parquet")
    yield model, x
    sys.modules.pop("ray_nets", None)


@pytest.fixture
def predict(run):
    def predict(**options):
        given = {"factory": "ray_nets:build", "checkpoint": "net.pt", "stats": "net.sbn.safetensors"}
        return run(
            "predict", **{**given, "data": "data", "out": "out", "samples": SAMPLES, "batch_size": 15, **options}
        )

    return predict


def read(folder):
    """Reads what was written, by id."""
    table = parquet.read_table(folder)
    order = np.argsort(np.array(table["id"].to_pylist()))
    return {name: np.array(table[name].to_pylist())[order] for name in table.column_names}


def wait_for(condition, seconds=100):
    start = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - start < seconds
        time.sleep(0.02)
    return found


def left_over(folder="."):
    return [path.name for path in Path(folder).iterdir() if path.name.endswith(".tmp")]


def assert_same(rows, prediction):
    names = {"class": "classes", "probabilities": "probs"}
    for name in NAMES:
        expected = getattr(prediction, names.get(name, name)).numpy()
        np.testing.assert_allclose(rows[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.ray
def test_a_node_that_dies_changes_nothing(cluster, network, predict, monkeypatch):
    from ray.data import DataContext

    context = DataContext.get_current()
    monkeypatch.setattr(context, "target_min_block_size", 1)  # or it would read all files at once
    monkeypatch.setattr(context, "read_op_min_num_blocks", 20)  # one a file: then the same inputs are in a batch
    model, x = network
    code, out, err = predict(ray=cluster.address)
    assert code == 0, err
    assert "Wrote out, 600 rows" in out
    whole = read("out")
    assert list(whole) == ["id", *NAMES]
    assert whole["id"].tolist() == list(range(NUM_INPUTS))  # none is missing, and none there twice
    stats = stochbn.load("net.sbn.safetensors")
    assert_same(whole, stochbn.predict(model, stats, x, num_samples=SAMPLES))

    Path("built").unlink()
    files_at_death = []

    def kill():
        started = wait_for(lambda: Path("built").exists() and Path("built").read_text().split())
        files_at_death.extend(wait_for(lambda: list(Path().glob(".again.*.tmp/*.parquet"))))
        (node,) = [node for node in cluster.worker_nodes if node.node_id == started[0]]
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    code, out, err = predict(ray=cluster.address, out="again")
    killer.join()
    assert code == 0, err
    assert 0 < len(files_at_death) < len(list(Path("again").iterdir()))
    assert len(set(Path("built").read_text().split())) == 2  # the other node went on
    again = read("again")

    for name, values in whole.items():
        np.testing.assert_array_equal(again[name], values)
    assert not left_over()


@pytest.mark.ray
def test_a_folder_of_images(cluster, network, predict):
    model, x = network
    images = (x[:40, 0] * 255).to(torch.uint8)
    for number, image in enumerate(images.numpy()):
        path = Path("images", "even" if number % 2 == 0 else "odd", f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert("RGB").save(path)  # the network takes one channel
    code, _, err = predict(ray=cluster.address, data="images", samples=5)
    assert code == 0, err
    rows = read("out")
    assert rows["id"].tolist() == sorted(f"{'odd' if i % 2 else 'even'}/{i:02}.png" for i in range(40))
    order = [int(Path(name).stem) for name in rows["id"]]
    stats = stochbn.load("net.sbn.safetensors")
    assert_same(rows, stochbn.predict(model, stats, images[order].unsqueeze(1) / 255, num_samples=5))


@pytest.mark.ray
def test_what_fails_in_a_worker_is_one_sentence(cluster, network, predict):
    table = pyarrow.table({"id": [0, 1], "x": [[0.0] * 5, [0.0] * 5]})
    parquet.write_table(table, "wrong.parquet")
    code, _, err = predict(ray=cluster.address, data="wrong.parquet", samples=5)
    assert code == 2
    assert err.splitlines()[-1].startswith("Error: Expected a batch that Sequential can take, got Tensor[2, 5] (")
    assert err.count("Error: ") == 1
    assert not Path("out").exists()
    assert not left_over()


def lock_holder(checkpoint):
    """Finds the process that holds a network's lock."""
    lock = checkpoint.with_name(f"{checkpoint.name}.lock")
    inode = f":{lock.stat().st_ino} "
    return next((int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines() if inode in line), None)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:Held-out data with")
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="finds a worker by the lock that it holds")
def test_networks_are_made_as_local_ones_are_though_a_worker_is_killed(cluster, run, tmp_path, monkeypatch):
    measure_little(monkeypatch)
    recipe = replace(PLAIN, epochs=12)
    experiment = Experiment("tiny", recipe, 2)
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    monkeypatch.setattr("stochbn.cli.experiments.report", lambda results: None)
    checkpoint = checkpoint_path(recipe, 0)
    epochs_at_death = []

    def kill():
        wait_for(checkpoint.exists)
        os.kill(lock_holder(checkpoint), signal.SIGKILL)
        epochs_at_death.append(len(find_checkpoint(recipe, 0).history))

    killer = threading.Thread(target=kill)
    killer.start()
    code, out, err = run("reproduce", "tiny", out="results", samples=4, ray=cluster.address)
    killer.join()
    assert code == 0, err
    assert 0 < epochs_at_death[0] < 12
    assert "2 of 2 networks done, 0 running, 0 left." in out
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "local"))
    reproduce(experiment, tmp_path / "local", num_samples=4, console=Console(quiet=True))
    for seed in (0, 1):
        made = read_checkpoint(tmp_path / "cache/checkpoints/tiny" / f"seed{seed}.safetensors").weights
        for name, tensor in read_checkpoint(checkpoint_path(recipe, seed)).weights.items():
            assert torch.equal(made[name], tensor)
        there, here = (File.read(prediction_path(Path(f), "tiny", seed)).tensors for f in ("results", "local"))
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in here)


@pytest.mark.ray
def test_a_network_that_fails_is_named(cluster, run, monkeypatch):
    experiment = Experiment("tiny", replace(PLAIN, epochs=1), 1)
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    folder = checkpoint_path(PLAIN, 0).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    code, _, err = run("reproduce", "tiny", out="results", samples=4, ray=cluster.address)
    assert code == 2
    assert "got 1 failures (tiny seed 0: Expected to write to the cache" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ray": "127.0.0.1:1"},
            r"Expected a Ray cluster at '127.0.0.1:1', got none that answers \(.*refused\)\. Name",
        ),
        ({"ray": "nowhere"}, "Expected a Ray cluster at 'nowhere', got none that answers"),
        ({"data": "nothing"}, "Expected data at nothing, got nothing there"),
        ({"data": "net.pt"}, r"Expected a \.parquet file, or a folder of these or of images, got neither in net\.pt"),
        ({"data": "bare.parquet"}, r"Expected columns 'id' and 'x' in bare.parquet, got 'id', 'a', 'b'\. .*'x' is mis"),
        (
            {"data": "unnamed.parquet"},
            r"Expected columns 'id' and 'x' in unnamed.parquet, got 'x'\. .* 'id' is missing",
        ),
        ({"data": "cut.parquet"}, r"Expected a Parquet file, got cut\.parquet, which cannot be read"),
        ({"out": "net.pt"}, r"Expected --out to be a new folder, got net\.pt, which is there"),
        ({"out": "data"}, "Expected --out to be a new folder, got data, which is there"),
        ({"out": "net.pt/out"}, "Expected to write to net.pt/out, got .* Name another --out"),
        ({"stats": "net.pt"}, "Expected a file written by stats.save, got .*net.pt"),
        ({"stats": ["net.sbn.safetensors"] * 2}, "Expected one --checkpoint, at most one --stats and a number"),
        ({"link": "probit"}, "Expected link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_a_cluster_starts(network, refused, options, message):
    table = pyarrow.table({"id": [0], "a": [0.0], "b": [0.0]})
    parquet.write_table(table, "bare.parquet")
    parquet.write_table(pyarrow.table({"x": [0.0]}), "unnamed.parquet")
    Path("cut.parquet").write_bytes(Path("bare.parquet").read_bytes()[:-9])
    before = sorted(Path().rglob("*"))
    given = {"factory": "ray_nets:build", "checkpoint": "net.pt", "stats": "net.sbn.safetensors"}
    given |= {"data": "data", "out": "out", "ray": "127.0.0.1:1", **options}
    assert re.search(message, refused("predict", **given))
    assert sorted(p for p in Path().rglob("*") if "__pycache__" not in str(p)) == before


@pytest.mark.parametrize(
    ("answer", "got"), [(b"", "timed out"), (b"HTTP/1.1 400 Bad Request", "another server is there")]
)
def test_a_server_that_is_no_cluster_is_not_waited_for(network, refused, monkeypatch, answer, got):
    monkeypatch.setattr("stochbn.cli.ray.PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as connections:

        def serve():
            connections.enter_context(server.accept()[0]).sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        given = {"factory": "ray_nets:build", "checkpoint": "net.pt", "data": "data", "out": "out"}
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert f"got none that answers ({got})" in refused("predict", **given, ray=address)
        thread.join()
    assert not left_over()


def test_the_address_may_be_left_out(run, monkeypatch):
    given = []
    monkeypatch.setattr("stochbn.cli.experiments._reproduce", lambda *values: given.append(values[-1]))
    for words in (["--ray"], ["--ray", "--jobs=2"], ["--ray", "head:6379"], ["--ray=head:6379"], []):
        assert run("reproduce", "digits", *words)[0] == 0
    assert given == ["", "", "head:6379", "head:6379", None]


def test_without_its_extra(network, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = refused("predict", factory="ray_nets:build", checkpoint="net.pt", data="data", out="out", ray="head:1")
    assert message.endswith("Install with pip install 'stochbn[ray]'.\n")


def test_images_are_scaled_with_channels_first():
    identity = torch.nn.Identity()
    images = torch.arange(24, dtype=torch.uint8).view(2, 2, 2, 3)
    assert torch.equal(call_on_images(identity, images), images.permute(0, 3, 1, 2) / 255)
    assert call_on_images(identity, images[..., 0]).shape == (2, 1, 2, 2)


def test_the_error_of_a_worker_is_found():
    inner, middle, outer = ValueError("inner"), RuntimeError("middle"), RuntimeError("outer")
    middle.cause, outer.cause = inner, middle
    inner.__cause__ = KeyError()  # of the sentence, which says it all
    assert find_cause(outer) is inner
    lost = RuntimeError("The node has died.")
    lost.__cause__ = Exception()  # as Ray Data raises it
    assert find_cause(lost) is lost


def test_not_with_torchrun(network, refused, monkeypatch):
    monkeypatch.setattr("stochbn.cli.job.is_launched", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("stochbn.cli.job.joined", lambda _: nullcontext())
    message = refused("predict", factory="ray_nets:build", checkpoint="net.pt", data="data", out="out", ray="head:1")
    assert "Expected either --ray or torchrun, got both" in message


def test_the_network_is_checked_where_there_is_no_gpu(network, monkeypatch):
    devices = []
    monkeypatch.setattr("stochbn.cli.ray.BatchPredictor", lambda **options: devices.append(options["device"]))
    given = {"factory": "ray_nets:build", "checkpoint": Path("net.pt"), "stats": None, "device": "cuda"}
    with pytest.raises(ValueError, match="Expected data at nothing"):
        predict_files("head:1", Path("nothing"), Path("out"), batch_size=1, **given)
    assert devices == ["cpu"]
