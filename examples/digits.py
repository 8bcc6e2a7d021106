"""SBN on scikit-learn's digits: trains on 0-4, then asks which of all ten the network should not trust itself on.

python examples/digits.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import trange

import stochbn


def data() -> tuple[TensorDataset, TensorDataset, Tensor]:
    """Returns train and test of the known digits 0-4, and images of the unknown 5-9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
    labels = torch.tensor(digits.target)
    known = torch.nonzero(labels < 5).flatten()
    known = known[torch.randperm(len(known))]
    test, train = known[:300], known[300:]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[test], labels[test]),
        images[labels >= 5],
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )


def train(train_set: TensorDataset, *, epochs: int = 15) -> nn.Module:
    model = network()
    loader = DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in trange(epochs, desc="train", unit="epoch", leave=False):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(0)
    train_set, test_set, unknown = data()
    known, targets = test_set.tensors
    models = [train(train_set) for _ in range(3)]

    loader = DataLoader(train_set, batch_size=16, shuffle=True)
    stats = [stochbn.fit(model, loader) for model in models]
    print(f"fitted: {stats[0]}")

    print(
        f"\n{len(known)} test images of the digits 0-4, which were trained on, {len(unknown)} of 5-9, unknown; 50 draws"
    )
    print(f"{'':<28}{'error %':>9}{'NLL':>9}{'ECE %':>9}{'entropy, known':>16}{'unknown':>9}{'AUROC':>8}")
    for name, model, distribution in (
        ("one network", models[0], None),
        ("one network + SBN", models[0], stats[0]),
        ("Deep Ensembles (3)", models, None),
        ("Deep Ensembles (3) + SBN", models, stats),
    ):
        inside = stochbn.predict(model, distribution, known)
        outside = stochbn.predict(model, distribution, unknown)
        is_unknown = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
        auroc = roc_auc_score(is_unknown, torch.cat([inside.entropy, outside.entropy]))
        print(
            f"{name:<28}{100 * stochbn.error(inside.probs, targets):>9.2f}{stochbn.nll(inside.probs, targets):>9.4f}"
            f"{100 * stochbn.ece(inside.probs, targets):>9.2f}{inside.entropy.mean():>16.3f}"
            f"{outside.entropy.mean():>9.3f}{auroc:>8.3f}"
        )


if __name__ == "__main__":
    main()
