"""The command that ends in a page about a network of your own: `assess`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import stochbn
from stochbn.cli.console import say
from stochbn.cli.loading import load_data, load_model
from stochbn.cli.names import read_classes
from stochbn.cli.options import Device, Factory, LinkName, Samples, Seed, Threads, Weights

AT_ONCE = 128  # inputs; of validation, test and out-of-domain data that changes no result


def assess(
    factory: Factory,
    checkpoint: Weights,
    test: Annotated[str, typer.Option(help="Test inputs x with labels y, in the same forms as for fit.")],
    out: Annotated[Path, typer.Option(help="Folder to write the page to.")],
    train: Annotated[str | None, typer.Option(help="Training data, to fit to; or pass --stats.")] = None,
    stats: Annotated[Path | None, typer.Option(help="What fit or tune wrote, in place of --train.")] = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Labelled data to tune and to choose on, seen neither in training nor in the test."),
    ] = None,
    out_of_domain: Annotated[str | None, typer.Option(help="Inputs that the network should not be sure of.")] = None,
    risk: Annotated[
        float, typer.Option(metavar="X", help="Error rate to promise among the inputs that are answered.")
    ] = 0.01,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="That of training. A DataLoader has its own.")
    ] = None,
    samples: Samples = 50,
    link: LinkName = "softmax",
    classes: Annotated[
        Path | None, typer.Option(help="Names of the classes, one a line; else the test data's own.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page; by default FACTORY.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Writes a page about your network: what it may be trusted with, and what draws add.

    The plain network, a temperature, the paper's SBN and draws in the last layer alone stand side by side, with
    intervals. The page has a verdict, reliability, how much the network may answer alone at a risk of your choice,
    entropies of known and out-of-domain inputs, drift, the most and least certain images, and the cost. Beside it are
    `assessment.json`, for classes the rule `abstain.json`, and `chosen.sbn.safetensors` where draws were chosen.

    Needs: the network's code and weights, test data, training data or what `stochbn fit` or `stochbn tune` wrote, and
    `pip install 'stochbn[plots]'`. Validation data are optional; without them nothing is tuned or compared.

    Next: open the page, and show it to whoever decides. `stochbn predict` if the network may be used.

    Example: `stochbn assess nets:build --checkpoint net.pt --train train.npz --batch-size 32 --validation val.npz --test test.npz --out assessment`
    """  # noqa: E501
    # Before anything takes long: what the page needs, and a place for it.
    from stochbn.assessment.assess import check_apart
    from stochbn.assessment.page import CHOSEN, NUMBERS, RULE, check_folder

    check_folder(out)
    given = {"train": train, "validation": validation, "test": test}
    check_apart({name: Path(data).resolve() for name, data in given.items() if data is not None})
    model = load_model(factory, checkpoint, device)
    loaders: dict[str, Any] = {"test_loader": load_data(test, model, AT_ONCE)}
    names = read_classes(classes, loaders["test_loader"]) or ()
    if train is not None:
        loaders["train_loader"] = load_data(train, model, batch_size, shuffle=True)
    for name, data in (("val_loader", validation), ("ood_loader", out_of_domain)):
        if data is not None:
            loaders[name] = load_data(data, model, AT_ONCE)
    options: dict[str, Any] = {"link": link, "risk": risk, "batch_size": batch_size, "num_samples": samples}
    options |= {"stats": None if stats is None else stochbn.load(stats), "class_names": names, "seed": seed}
    found = stochbn.assess(model, title=title or factory, progress=sys.stderr.isatty(), **loaders, **options)
    page = found.save(out)
    say(str(found))
    beside = [name for name in (NUMBERS, RULE, CHOSEN) if (out / name).exists()]
    say(f"\nWrote {page}, with {', '.join(beside)} beside it.")
    say(f"Next: open {page}, and show it to whoever decides whether the network may be used.")
    if validation is None:
        say("Validation data (--validation) would add a temperature, tuned draws, and a choice among them.")
