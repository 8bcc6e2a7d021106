"""Runs commands one after the other in each process that torchrun starts, and writes down what each one did."""

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch.distributed as dist

from stochbn.cli.main import main


def run_all(commands: list[list[str]], rank: str) -> None:
    dist.init_process_group("gloo")  # one for all commands: torchrun's store serves the first one only
    for number, arguments in enumerate(commands):
        out, err = io.StringIO(), io.StringIO()
        code = None
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main([word.replace("RANK", rank) for word in arguments])
            except SystemExit as ended:
                code = ended.code
        result = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        Path(f"job-{number}-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()  # its threads would end the process with an error


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), os.environ["RANK"])
