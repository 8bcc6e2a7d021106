"""What `stochbn --help` shows, and lines that cannot be parsed."""

import re

import pytest

import stochbn

COMMANDS = ["demo", "play", "data", "train", "evaluate", "report", "reproduce", "study"]
COMMANDS += ["fit", "tune", "assess", "predict", "export"]


def test_help_of_the_whole_names_every_command(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"│ {command} ", out) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert all(part in text for part in (" Needs: ", " Next: ", f" Example: stochbn {command} "))
    assert "Done in" not in out


def test_version(run):
    assert run("--version") == (0, f"stochbn {stochbn.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["train", "digits", "--sed", "1"], "No such option: --sed"),
        (["train", "digits", "--seed", "one"], "Invalid value for '--seed'"),
        (["train", "digits", "--epochs", "0"], "Invalid value for '--epochs'"),
    ],
)
def test_wrong_usage_is_one_line(refused, arguments, message):
    assert message in refused(*arguments)
