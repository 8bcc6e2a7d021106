"""Runs a command, and reports in one line what went wrong."""

import re
import sys
import time
import warnings
from collections.abc import Sequence

from stochbn.cli import job
from stochbn.distributed.ranks import is_told

EXTRAS = {
    "cli": ("numpy", "rich", "typer"),
    "play": ("starlette", "uvicorn"),
    "plots": ("jinja2", "matplotlib"),
    "ray": ("pyarrow", "ray"),
    "experiments": ("PIL", "pooch", "scipy", "sklearn"),
}
# Arguments of the library that are options here, with a value or without.
SPELLED = re.compile(r"\b(batch_size|choose|compile|family|layers|link|num_groups|num_kept|rank)=('?)(\w*)\2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0, or 2 after an error and 130 after Ctrl-C, either with one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # anywhere in the line, as one adds it to the end after an error
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    start = time.perf_counter()
    code = 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _complain(spell(f"Warning: {message}"))
            from stochbn.cli.commands import run  # only here, so that a missing extra is an error like any other

            with job.joined(given[0]):
                run(given)
    except KeyboardInterrupt:
        code = 130
        resumes = given[0] in ("demo", "play", "train", "evaluate", "reproduce", "study")
        print("Interrupted; run the same command to resume." if resumes else "Interrupted.", file=sys.stderr)
    except Exception as error:
        if debug:
            raise
        code = 2
        _complain(f"Error: {explain(error)}", error)
    is_quiet = {"--help", "--version", "--json"} & set(given)
    if not code and job.is_first() and given[0] != "data" and not is_quiet:
        minutes, seconds = divmod(round(time.perf_counter() - start), 60)
        print(f"Done in {minutes} min {seconds} s.")
    sys.exit(code)


def _complain(text: str, error: Exception | None = None) -> None:
    """Prints a line on stderr; of several processes the first does, and one whose error the others do not know."""
    if job.is_first() or (error is not None and not is_told(error)):
        print(text, file=sys.stderr)


def spell(text: str) -> str:
    """Writes arguments of the library as this command's options.

    Examples:
        >>> spell("Pass link='sigmoid' for labels, another batch_size=, or compile=True.")
        'Pass --link sigmoid for labels, another --batch-size, or --compile.'
    """
    return SPELLED.sub(lambda found: f"--{found[1].replace('_', '-')} {found[3].replace('True', '')}".rstrip(), text)


def explain(error: Exception) -> str:
    """Puts an error on one line, with its type only if nobody foresaw it.

    Examples:
        >>> explain(ModuleNotFoundError("No module named 'pooch'", name="pooch"))
        "No module named 'pooch'. Install with pip install 'stochbn[experiments]'."
        >>> explain(KeyError("fc"))
        "KeyError: 'fc' (--debug shows the traceback)"
    """
    # The command-line parser's errors are known by this method; their class has moved between versions of typer.
    text = " ".join(str(getattr(error, "format_message", lambda: error)()).split())
    text, _, of_the_library = text.partition(" Pass call= ")  # advice that has no option here
    if of_the_library:
        text += " Let the factory return a model that takes such batches."
    text, _, of_the_library = text.partition(" Pass target=")
    if of_the_library:
        text += " Give the data labels: y in the file, or the second of what the data set yields."
    text = text.replace("Reshape them with target=, or pass", "Reshape them in the data, or pass")
    text = spell(text)
    if isinstance(error, ImportError) and error.name:
        package = error.name.partition(".")[0]
        for extra, packages in EXTRAS.items():
            if package in packages:
                return f"{text}. Install with pip install 'stochbn[{extra}]'."
    foreseen = isinstance(error, (ValueError, TypeError, OSError, ImportError)) or hasattr(error, "format_message")
    ours = type(error).__module__.startswith("stochbn.")
    return text if foreseen or ours else f"{type(error).__name__}: {text} (--debug shows the traceback)"
