from dataclasses import replace

import pytest
import torch
from torch import nn

from stochbn.experiments.training.networks import ResidualBlock, lenet5, resnet18, vgg11
from stochbn.experiments.training.recipes import RECIPES


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def list_batch_norms(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def test_lenet5_batch_norms_are_named_after_their_layer():
    assert list_batch_norms(lenet5()) == ["conv1.norm", "conv2.norm", "fc.norm"]


def test_lenet5_has_the_papers_sizes():
    network = lenet5()
    convolutions = 20 * 25 + 50 * 20 * 25
    linear = 800 * 500 + 500 * 10 + 10
    batch_norm = 2 * (20 + 50 + 500)
    assert count_parameters(network) == convolutions + linear + batch_norm
    assert [network.get_submodule(name).num_features for name in list_batch_norms(network)] == [20, 50, 500]


def test_vgg11_and_resnet18_have_the_published_sizes():
    # Counted by hand: 3 × 3 convolutions without bias, two numbers a batch-norm channel, one linear head.
    vgg = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 512), (512, 512)]
    assert count_parameters(vgg11(10)) == sum(9 * a * b + 2 * b for a, b in vgg) + 512 * 10 + 10
    assert len(list_batch_norms(vgg11(10))) == 8
    assert count_parameters(resnet18(10)) == 11_173_962
    assert len(list_batch_norms(resnet18(10))) == 20


@pytest.mark.parametrize(
    ("build", "size", "in_channels"), [(lenet5, 28, 1), (lenet5, 28, 3), (vgg11, 32, 3), (resnet18, 32, 1)]
)
def test_logits_have_one_column_a_class(build, size, in_channels):
    network = build(num_classes=7, in_channels=in_channels, width=0.125)
    assert network(torch.rand(3, in_channels, size, size)).shape == (3, 7)


@pytest.mark.parametrize("build", [lenet5, vgg11])
def test_dropout_zero_means_no_dropout_layer(build):
    def list_dropout(network):
        return [module.p for module in network.modules() if isinstance(module, nn.Dropout)]

    assert list_dropout(build(width=0.125)) == []
    assert set(list_dropout(build(width=0.125, dropout=0.3))) == {0.3}


def test_lenet5_drops_at_the_end_of_each_of_its_three_blocks():
    network = lenet5(dropout=0.5)
    blocks = [network.get_submodule(name) for name in ("conv1", "conv2", "fc")]
    assert all(isinstance(block[-1], nn.Dropout) for block in blocks)
    assert [name for name, _ in network.conv1.named_children()] == ["conv", "norm", "relu", "pool", "dropout"]


def test_width_multiplies_channels_and_leaves_at_least_one():
    assert lenet5(width=0.5).conv2.conv.out_channels == 25
    assert lenet5(width=1e-6).conv1.conv.out_channels == 1


def test_batch_norm_makes_the_missing_bias_irrelevant():
    network = lenet5(width=0.25).train()
    images = torch.rand(8, 1, 28, 28)
    expected = network(images)
    network.conv1.conv.register_parameter("bias", nn.Parameter(torch.randn(5)))
    torch.testing.assert_close(network(images), expected, rtol=1e-3, atol=1e-4)


def test_residual_block_with_silent_branch_is_its_shortcut():
    block = ResidualBlock(4, 4, stride=1).eval()
    nn.init.zeros_(block.norm2.weight)
    images = torch.rand(2, 4, 6, 6)
    assert torch.equal(block(images), images)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_every_recipe_builds_its_network(recipe):
    with torch.device("meta"):
        network = recipe.build_network()
    size = 28 if recipe.network == "lenet5" else 32
    images = torch.empty(2, recipe.in_channels, size, size, device="meta")
    assert network(images).shape == (2, recipe.num_classes)
    assert any(isinstance(module, nn.Dropout) for module in network.modules()) == bool(recipe.dropout)
    assert RECIPES[recipe.name] is recipe


def test_resnet18_refuses_dropout():
    with pytest.raises(ValueError, match=r"Expected no dropout in resnet18, got 0\.5"):
        replace(RECIPES["resnet18"], dropout=0.5).build_network()


def test_lenet5_recipe_is_the_authors_setting():
    recipe, dropout = RECIPES["lenet5"], RECIPES["lenet5-dropout"]
    assert (recipe.optimizer, recipe.learning_rate, recipe.batch_size, recipe.epochs) == ("adam", 1e-3, 16, 50)
    assert (recipe.width, recipe.weight_decay, recipe.augment, recipe.dropout) == (1.0, 0.0, False, 0.0)
    assert dropout.dropout == 0.5
