"""Starts the ranks of a job, each a process of its own, and collects what its checks found."""

import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 60  # seconds that a rank waits for the others


def list_checks(script: Path) -> list[str]:
    """Reads the names of a script's checks, which are its functions `check_…`."""
    lines = script.read_text("utf-8").splitlines()
    return [line[10:].partition("(")[0] for line in lines if line.startswith("def check_")]


def start(script: Path, size: int, folder: Path) -> dict[str, list[str]]:
    """Runs the checks of a script in a job, and returns for each what every rank found: "" or a traceback."""
    checks = list_checks(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    paths = [str(path) for path in (Path(__file__).parent, *sys.path) if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-W", "error", str(script), str(size), str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), *checks], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=400)[1] for process in processes]
    found: dict[str, list[str]] = {}
    for name in checks:
        paths_of = [folder / f"{name}-{rank}.json" for rank in range(size)]
        found[name] = [
            json.loads(path.read_text()) if path.exists() else f"no result of rank {rank}:\n{errors[rank]}"
            for rank, path in enumerate(paths_of)
        ]
    return found


def run(names_of: dict[str, Any]) -> None:
    """Is what a started script does with its `globals()`: joins the job, and writes down what each check raised."""
    size, folder, rank, *names = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT), rank=rank, world_size=size)
    for name in names:
        torch.manual_seed(0)
        path = folder / f"{name}-{rank}.json"
        try:
            names_of[f"check_{name}"](rank, folder)
            path.write_text(json.dumps(""))
        except BaseException:
            path.write_text(json.dumps(traceback.format_exc()))
            break  # the ranks may be out of step
    os._exit(0)  # without waiting for others, who may have died
