"""Draws README's picture, docs/picture.png, from committed results alone: python docs/picture.py."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
# Each row of README's table: the study's method, as it is or with a temperature, README's name of it, and a colour of
# Okabe and Ito's palette.
ROWS = (
    ("plain", "plain", "one network", "#777777"),
    ("plain", "tempered", "+ temperature", "#777777"),
    ("sbn", "plain", "+ the paper's SBN", "#009e73"),
    ("last-tuned", "plain", "+ last layer (we recommend)", "#009e73"),
    ("ensemble", "plain", "six networks", "#0072b2"),
)


def draw(out: Path = ROOT / "docs" / "picture.png") -> None:
    """Draws examples of digits and letters, and beside them the false alarms of each method."""
    study = json.loads((ROOT / "results/beyond/lenet5/study.json").read_text())
    shown = load_file(ROOT / "results/lenet5/predictions/diagnostics.safetensors")
    figure = plt.figure(figsize=(6.8, 2.7), facecolor="white")
    for top, title, key in (
        (0.52, "trained on digits", "gallery/certain test/images"),
        (0.07, "then shown letters", "gallery/uncertain out-of-domain/images"),
    ):
        figure.text(0.015, top + 0.32, title, fontsize=11)
        for place, number in enumerate((1, 3, 4) if "test" in key else (3, 5, 7)):
            axes = figure.add_axes((0.015 + 0.095 * place, top, 0.09, 0.29))
            axes.imshow(shown[key][number, 0], cmap="gray")
            axes.set_axis_off()
    bars = figure.add_axes((0.655, 0.05, 0.335, 0.7))
    for row, (key, quality, label, colour) in enumerate(ROWS):
        score = study["methods"][key][quality]["scores"]["fpr95_entropy"]
        percent, std = 100 * score["value"], 100 * score["std"]
        bars.barh(row, percent, xerr=std, color=colour, height=0.62, error_kw={"ecolor": "#333333", "lw": 1})
        bars.text(percent + std + 0.2, row, f"{percent:.1f} %", va="center", fontsize=11)
        bars.text(-0.3, row, label, va="center", ha="right", fontsize=11)
    bars.set(xlim=(0, 19), xticks=[], yticks=[], ylim=(len(ROWS) - 0.5, -0.5))
    bars.spines[["top", "right", "bottom"]].set_visible(False)
    figure.text(0.985, 0.82, "false alarms: digits flagged\nwhen 95 % of the letters are", fontsize=11, ha="right")
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw()
