"""The paper's networks with plain batch norm: LeNet-5, and VGG-11 and ResNet-18 in the form for CIFAR's 32 × 32.

Each is a function that returns an `nn.Module` of logits `(N, K)`. `dropout=0` means that the network holds no
`nn.Dropout` at all. Convolutions and layers in front of a batch norm have no bias: the mean takes it away again.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

# The layers behind the last reduction of resolution inside each network, as patterns of names.
LAST_STAGES = {"lenet5": ("fc.*",), "vgg11": ("conv7.*", "conv8.*"), "resnet18": ("stage4.*",)}


def lenet5(num_classes: int = 10, in_channels: int = 1, *, width: float = 1.0, dropout: float = 0.0) -> nn.Sequential:
    """Builds LeNet-5 for 28 × 28 images: 20 and 50 channels of 5 × 5, then 500 units.

    Batch norm and ReLU follow each of the three, 2 × 2 max pooling each convolution, dropout closes each block.
    The batch-norm layers are `conv1.norm`, `conv2.norm` and `fc.norm`.

    Examples:
        >>> import torch
        >>> lenet5()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    channels1, channels2, units = (_scale(n, width) for n in (20, 50, 500))
    return nn.Sequential(
        OrderedDict(
            conv1=_block(nn.Conv2d(in_channels, channels1, 5, bias=False), pool=True, dropout=dropout),
            conv2=_block(nn.Conv2d(channels1, channels2, 5, bias=False), pool=True, dropout=dropout),
            flatten=nn.Flatten(),
            fc=_block(nn.Linear(channels2 * 4 * 4, units, bias=False), dropout=dropout),
            head=nn.Linear(units, num_classes),
        )
    )


def vgg11(num_classes: int = 10, in_channels: int = 3, *, width: float = 1.0, dropout: float = 0.0) -> nn.Sequential:
    """Builds VGG-11 for 32 × 32 images: eight 3 × 3 convolutions, five of them followed by pooling, one linear head.

    Dropout, if any, follows each pooling.

    Examples:
        >>> import torch
        >>> vgg11(5, width=0.125)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    plan = [(64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False), (512, True)]
    channels = in_channels
    for index, (size, pool) in enumerate(plan, start=1):
        conv = nn.Conv2d(channels, _scale(size, width), 3, padding=1, bias=False)
        layers[f"conv{index}"] = _block(conv, pool=pool, dropout=dropout if pool else 0.0)
        channels = conv.out_channels
    layers["flatten"] = nn.Flatten()  # five poolings take 32 × 32 to 1 × 1
    layers["head"] = nn.Linear(channels, num_classes)
    return nn.Sequential(layers)


def resnet18(num_classes: int = 10, in_channels: int = 3, *, width: float = 1.0) -> nn.Sequential:
    """Builds ResNet-18 for 32 × 32 images: a 3 × 3 stem without pooling, then four stages of two residual blocks.

    Examples:
        >>> import torch
        >>> resnet18(5, width=0.125)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = _scale(64, width)
    layers["stem"] = _block(nn.Conv2d(in_channels, channels, 3, padding=1, bias=False))
    for index, size in enumerate((64, 128, 256, 512), start=1):
        out_channels = _scale(size, width)
        layers[f"stage{index}"] = nn.Sequential(
            ResidualBlock(channels, out_channels, stride=1 if index == 1 else 2),
            ResidualBlock(out_channels, out_channels, stride=1),
        )
        channels = out_channels
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels, num_classes)
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions with batch norm around a shortcut, which is a 1 × 1 convolution where shapes differ.

    Examples:
        >>> import torch
        >>> ResidualBlock(4, 8, stride=2)(torch.zeros(1, 4, 6, 6)).shape
        torch.Size([1, 8, 3, 3])
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(out_channels)))

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(residual + self.shortcut(x))


def _block(layer: nn.Conv2d | nn.Linear, *, pool: bool = False, dropout: float = 0.0) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if isinstance(layer, nn.Conv2d):
        parts.update(conv=layer, norm=nn.BatchNorm2d(layer.out_channels), relu=nn.ReLU())
    else:
        parts.update(linear=layer, norm=nn.BatchNorm1d(layer.out_features), relu=nn.ReLU())
    if pool:
        parts["pool"] = nn.MaxPool2d(2)
    if dropout:
        parts["dropout"] = nn.Dropout(dropout)
    return nn.Sequential(parts)


def _scale(size: int, width: float) -> int:
    return max(1, round(size * width))
