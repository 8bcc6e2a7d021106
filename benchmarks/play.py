"""`python -m benchmarks.play`: how long `stochbn play` takes to answer a stroke.

A real server answers a pen that draws eleven curves, point by point, each time with all strokes so far. What
is timed is the whole way of a question: JSON, HTTP on this machine, drawing the image, 256 networks, and back.
"""

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from rich.console import Console

from benchmarks.machine import describe
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.training.recipes import Recipe
from stochbn.play.panel import NUM_NETWORKS, Panel, load_panel
from stochbn.play.server import listen, make_app

TARGET = 0.1  # seconds; what takes longer is seen to lag behind the pen
NUM_DRAWINGS = 11
NUM_POINTS = 100  # of a drawing: a stroke of a second or two


def main(output: Path = Path("results/play.json"), recipe: Recipe | None = None) -> None:
    """Measures, prints, and writes `results/play.json`."""
    torch.set_num_threads(1)  # as the command does
    console = Console(width=120)
    panel = load_panel(console, recipe)
    with serving(panel) as port:
        seconds = ask(port, [drawing(number) for number in range(NUM_DRAWINGS)])
    found: dict[str, Any] = {
        "median": float(np.median(seconds)),
        "p99": float(np.percentile(seconds, 99)),
        "longest": max(seconds),
        "questions": len(seconds),
    }
    shown = ", ".join(f"{name} {1e3 * found[name]:.1f}" for name in ("median", "p99", "longest"))
    console.print(f"milliseconds to answer a stroke, of {len(seconds)}: {shown}", highlight=False)
    results = describe("python -m benchmarks.play")
    results |= {"num_networks": NUM_NETWORKS, "target_seconds": TARGET, "answer_seconds": found}
    results["target_met"] = found["p99"] < TARGET
    output.write_text(json.dumps(rounded(results), indent=1) + "\n")


def drawing(number: int) -> list[list[list[float]]]:
    """Returns one stroke of a pen, a curve that turns the more often the higher its number."""
    turns = [2 * math.pi * n / NUM_POINTS for n in range(NUM_POINTS)]
    return [[[50 + 30 * math.sin((1 + number / 4) * turn), 50 - 45 * math.cos(turn)] for turn in turns]]


@contextmanager
def serving(panel: Panel) -> Iterator[int]:
    """Serves the page in another thread; yields its port."""
    with listen("127.0.0.1", 0) as taken:
        server = uvicorn.Server(uvicorn.Config(make_app(panel), log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            yield taken.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ask(port: int, drawings: list[list[list[list[float]]]]) -> list[float]:
    """Draws each point by point, over one connection; returns seconds from question to answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = []
    for [stroke] in drawings:
        for length in range(1, len(stroke) + 1):
            body = json.dumps([stroke[:length]])
            start = time.perf_counter()
            connection.request("POST", "/answer", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            seconds.append(time.perf_counter() - start)
            if sum(answer["votes"]) != NUM_NETWORKS:
                raise RuntimeError(f"Expected {NUM_NETWORKS} votes, got {answer['votes']}.")
    connection.close()
    return seconds


if __name__ == "__main__":
    main()
