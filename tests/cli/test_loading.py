"""Networks, checkpoints and data in the forms that users have, and what cannot be used."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import stochbn

pytestmark = pytest.mark.usefixtures("own")


@pytest.mark.parametrize(
    "data", ["own_nets:tensor", "own_nets:x", "own_nets:loader", "x.npy", "x.npz", "x.safetensors"]
)
def test_data_come_in_many_forms(run, own, data):
    np.save("x.npy", own["x"].numpy())
    np.savez("x.npz", images=own["x"].numpy())
    save_file({"x": own["x"], "other": own["x"].clone()}, "x.safetensors")
    assert run("fit", data=data)[0] == 0
    assert run("predict", data=data, stats="net.sbn.safetensors", samples=2)[0] == 0
    prediction = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=2)
    written = np.genfromtxt("pred.csv", delimiter=",", names=True)
    np.testing.assert_allclose(written["entropy"], prediction.entropy.numpy(), rtol=1e-5)


def test_a_stream_of_inputs_can_be_predicted(run):
    assert run("predict", data="own_nets:stream")[0] == 0
    assert len(Path("pred.csv").read_text().splitlines()) == 1 + 8


def test_a_loader_keeps_its_own_batch_size(run):
    assert "batch_size=16, num_batches=4" in run("fit", data="own_nets:loader", batch_size=None)[1]


@pytest.mark.parametrize(
    "wrap",
    [
        {},
        {"key": "state_dict"},
        {"key": "model"},
        {"prefix": "module."},
        {"key": "state_dict", "prefix": "model."},  # Lightning's
        {"key": "state_dict", "prefix": "net._orig_mod.module."},
    ],
)
def test_checkpoints_come_in_many_forms(run, own, wrap):
    state = {f"{wrap.get('prefix', '')}{name}": value for name, value in own["model"].state_dict().items()}
    torch.save({wrap["key"]: state, "epoch": 3} if "key" in wrap else state, "other.pth")
    save_file(state, "other.safetensors")
    for name in ["other.pth", *([] if "key" in wrap else ["other.safetensors"])]:
        code, out, _ = run("predict", checkpoint=name)
        assert code == 0
        assert ("Stripped the prefix" in out) == ("prefix" in wrap)
        assert (
            f"Stripped the prefix {wrap.get('prefix', '')!r} from the checkpoint's keys.\n" in out
            or "prefix" not in wrap
        )
    run("predict", out="direct.csv")
    assert Path("pred.csv").read_text() == Path("direct.csv").read_text()


def test_what_lightning_keeps_beside_the_network_is_left_out(run, own):
    state = {f"model.{name}": value for name, value in own["model"].state_dict().items()}
    state = {name: value for name, value in state.items() if "num_batches_tracked" not in name}  # as old torch wrote
    lightning = {"epoch": 3, "pytorch-lightning_version": "2.5.0", "hyper_parameters": {"lr": 0.1}}
    torch.save({**lightning, "state_dict": state | {"criterion.weight": torch.ones(3)}}, "epoch=3.ckpt")
    code, out, _ = run("predict", checkpoint="epoch=3.ckpt")
    assert code == 0
    assert "Stripped the prefix 'model.' from the checkpoint's keys, and left out 'criterion.weight'.\n" in out
    run("predict", out="direct.csv")
    assert Path("pred.csv").read_text() == Path("direct.csv").read_text()


def test_two_networks_in_a_checkpoint_are_not_chosen_from(refused, own):
    state = own["model"].state_dict()
    torch.save({f"{p}.{name}": value for p in ("model", "ema") for name, value in state.items()}, "two.pt")
    message = refused("predict", checkpoint="two.pt")
    assert "Expected the weights of one network in two.pt, got several: 'model.', 'ema.'. Save those of one:" in message


IMAGES = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.LazyLinear(3))

class Bytes(nn.Sequential):
    def forward(self, x):
        return super().forward(x.permute(0, 3, 1, 2).float() / 255)

def takes_bytes():
    return Bytes(*build())
"""


@pytest.fixture
def images():
    """A network for colour images in the current folder, and images as files have them."""
    Path("images.py").write_text(IMAGES)
    network = runpy.run_path("images.py")["build"]()
    for _ in range(4):  # running statistics as after training
        network(torch.rand(16, 3, 8, 8))
    torch.save(network.state_dict(), "images.pt")
    yield np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3), dtype=np.uint8)
    sys.modules.pop("images", None)


@pytest.mark.parametrize("command", ["fit", "predict", "export"])
@pytest.mark.parametrize(
    ("convert", "wrong"),
    [
        (lambda x: x, r"channels last and bytes in x.npz: \(32, 8, 8, 3\) in uint8"),
        (lambda x: x / 255, r"channels last in x.npz: \(32, 8, 8, 3\) in float32"),
        (lambda x: x.transpose(0, 3, 1, 2), r"bytes in x.npz: \(32, 3, 8, 8\) in uint8"),
    ],
)
def test_images_as_files_have_them_get_a_sentence_that_works(run, refused, images, command, convert, wrong):
    options = {"factory": "images:build", "checkpoint": "images.pt", "data": "x.npz"}
    np.savez("x.npz", x=convert(images))
    message = refused(command, **options)
    assert re.search(rf"Expected images \(N, C, H, W\) preprocessed as in training, got {wrong}. Convert them", message)
    names = {"x": convert(images)}
    exec(re.search(r"before np.savez, (x = .*), and normalise", message)[1], names)
    np.savez("x.npz", x=names["x"])
    code, _, err = run(command, **options)
    assert code == 0, err


def test_a_network_may_take_bytes(run, images):
    np.savez("x.npz", x=images)
    assert run("predict", factory="images:takes_bytes", checkpoint="images.pt", data="x.npz")[0] == 0


def test_a_network_object_will_do(run):
    assert run("predict", factory="own_nets:network")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factory": "own_nets"}, "Expected package.module:factory, got 'own_nets'"),
        ({"factory": "own_nets:"}, "Expected package.module:factory"),
        ({"factory": "no_such.nets:build"}, "Expected a module 'no_such.nets', got none"),
        (
            {"factory": "broken:build"},
            "Expected to import 'broken', got ModuleNotFoundError: No module named 'no_such'",
        ),
        ({"factory": "own_nets:bild"}, "Expected 'bild' in 'own_nets', got a module without it"),
        ({"factory": "own_nets:number"}, "Expected own_nets:number to be or to return an nn.Module, got int"),
        ({"factory": "own_nets:tensor"}, "an nn.Module, got Tensor"),
        ({"factory": "own_nets:fails"}, r"own_nets:fails\(\) to succeed, got RuntimeError: no luck"),
        ({"checkpoint": "missing.pt"}, "Expected a checkpoint at missing.pt, got none"),
        ({"checkpoint": "own_nets.py"}, "Expected a saved model.state_dict"),
        ({"checkpoint": "list.pt"}, "Expected a state dict in list.pt, got list"),
        ({"checkpoint": "keys.pt"}, "missing '0.weight', '0.bias', '1.weight' and 11 more; unexpected 'a.weight'"),
        ({"checkpoint": "sizes.pt"}, "size mismatch for 0.weight"),
        ({"data": "missing.npz"}, "Expected data at missing.npz, got no such file"),
        ({"data": "data.csv"}, "Expected a file in .npz, .npy, .safetensors or package.module:factory, got 'data.csv'"),
        ({"data": "empty.npz"}, "Expected an array 'x' of inputs in empty.npz, got no arrays"),
        ({"data": "two.npz"}, "Expected an array 'x' of inputs in two.npz, got 'a', 'b'"),
        ({"data": "labels.npz"}, r"Expected a label 'y' for each of 3 inputs in labels.npz, got \[2\]"),
        ({"data": "ids.npz"}, "Expected one of 'ids' for each of 3 inputs in ids.npz, got 2"),
        (
            {"data": "names.npz"},
            r"in names.npz, got a file that cannot be read \(names as an array \[2, 2\] of float64",
        ),
        ({"data": "broken.npz"}, "Expected arrays of numbers in broken.npz"),
        ({"data": "broken.safetensors"}, "Expected arrays of numbers in broken.safetensors"),
        ({"data": "objects.npy"}, "Expected arrays of numbers in objects.npy"),
        ({"data": "own_nets:number"}, "a Dataset, a DataLoader or a tensor, got int"),
        (
            {"data": "wide.npy"},
            r"mat1 and mat2 shapes cannot be multiplied.*Let the factory return a model that takes such",
        ),
        ({"device": "abacus"}, "Expected a device that torch can use, got 'abacus'"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_what_cannot_be_used_is_one_line(refused, own, command, options, message):
    Path("broken.py").write_text("import no_such\n")
    torch.save([1], "list.pt")
    torch.save({"a.weight": torch.ones(1)}, "keys.pt")
    torch.save(own["model"].state_dict() | {"0.weight": torch.ones(2, 2)}, "sizes.pt")
    np.savez("empty.npz")
    np.savez("two.npz", a=np.ones(3), b=np.ones(3))
    np.savez("labels.npz", x=np.ones((3, 4)), y=np.ones(2))
    np.savez("ids.npz", x=np.ones((3, 4)), ids=np.array(["a", "b"]))
    np.savez("names.npz", x=np.ones((3, 4)), classes=np.ones((2, 2)))
    np.save("objects.npy", np.array([{}, {}], dtype=object))
    np.save("wide.npy", np.ones((64, 9)))
    Path("broken.npz").write_text("no")
    Path("broken.safetensors").write_text("no")
    assert re.search(message, refused(command, **options))
