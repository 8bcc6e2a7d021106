"""A process of its own for interrupts at random moments: within a test runner they would hit its own code too.

`python interrupted.py captured|stacked` prints how many of 400 calls were interrupted, and what they left behind.
"""

import json
import math
import random
import signal
import sys
import time
import warnings

import torch
from torch import nn

import stochbn
from stochbn.inference.engine import network

NUM_CALLS = 400


def main(path: str) -> dict[str, object]:
    network.WORTH_CAPTURING = -1 if path == "captured" else math.inf
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = [torch.rand(8, 3, 8, 8) for _ in range(12)]
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    for x in images * 10:
        model(x)
    x = images[0]
    stats = stochbn.fit(model, images, progress=False)

    def work() -> None:
        stochbn.predict(model, stats, x, num_samples=4)
        stochbn.fit(model, images[:3], progress=False)

    expected = stochbn.predict(model, stats, x, num_samples=4).samples
    plain = model.eval()(x).detach()
    work()
    start = time.perf_counter()
    work()
    duration = time.perf_counter() - start
    moments = random.Random(0)
    interrupted, left = 0, []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(NUM_CALLS):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-5, moments.random() * duration))
            work()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        except Exception as error:
            left.append(f"{type(error).__name__} in place of the interrupt")
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not torch.is_grad_enabled():
            left.append("gradients off")
        if torch._C._functorch.get_dynamic_layer_stack_depth():
            left.append("a level of vmap")
        if not torch.equal(model(x), plain):
            left.append("a model that gives other numbers")
        if not all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters()):
            left.append("weights that are no parameters")
    if not torch.equal(stochbn.predict(model, stats, x, num_samples=4).samples, expected):
        left.append("other predictions")
    if torch._C._len_torch_function_stack():
        left.append("a function mode")
    return {"interrupted": interrupted, "left": left}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # an interrupt may come within a destructor
    print(json.dumps(main(sys.argv[1])))
