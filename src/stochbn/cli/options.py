"""Options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from stochbn.experiments.training.recipes import EXPERIMENTS, SGD_LEARNING_RATE

Data = Annotated[Path | None, typer.Option(help="Folder with the published data files, asked before any download.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch uses; by default one a core.")]
Samples = Annotated[int, typer.Option(min=1, help="Networks drawn for each prediction.")]
Experiment = Annotated[str, typer.Argument(metavar="EXPERIMENT", help=f"One of {', '.join(EXPERIMENTS)}.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
TrainSize = Annotated[int | None, typer.Option("--batch-size", min=2, help="Instead of the recipe's.")]
Optimizer = Annotated[str | None, typer.Option(help="adam with a linear decay, or sgd with one cycle.")]
Rate = Annotated[
    float | None, typer.Option("--learning-rate", min=0, help=f"The highest; {SGD_LEARNING_RATE} for sgd.")
]
ClassSeed = Annotated[
    int | None, typer.Option(min=0, help="Draws the five known classes of CIFAR5; by default 0 to 4.")
]
DropoutRate = Annotated[float | None, typer.Option(help="Dropout rate, of a recipe that has dropout.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="results/EXPERIMENT")]
Factory = Annotated[str, typer.Argument(metavar="FACTORY", help="Network as package.module:factory.")]
Weights = Annotated[Path, typer.Option(help="Its weights: a state dict from torch.save, or safetensors.")]
Inputs = Annotated[str, typer.Option(help="Inputs: .npz, .npy or .safetensors, or package.module:factory.")]
BatchSize = Annotated[int | None, typer.Option(min=2, help="That of training. A DataLoader has its own.")]
NumBatches = Annotated[int | None, typer.Option(min=2, help="Use only that many mini-batches.")]
Layers = Annotated[list[str] | None, typer.Option(help="BatchNorm layers to treat, as 'layer4.*'; repeatable.")]
Dropout = Annotated[bool, typer.Option("--dropout", help="Keep dropout layers active, in fit and predict alike.")]
Link = Annotated[str, typer.Option(help="softmax for classes, sigmoid for labels, identity for regression.")]
Device = Annotated[str, typer.Option(help="Where the network runs, such as cuda.")]
