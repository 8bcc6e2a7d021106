"""The `stochbn` command: runs one of the commands and reports what went wrong in one line."""

import sys
import time
import warnings
from collections.abc import Sequence

INSTALL = "Install with pip install 'stochbn[experiments]'."
EXTRA = {"PIL", "jinja2", "matplotlib", "numpy", "pooch", "rich", "scipy", "sklearn", "typer"}

try:
    import typer

    from stochbn.cli.commands import app
    from stochbn.cli.console import say
except ModuleNotFoundError as missing:
    print(f"Error: {missing}. {INSTALL}", file=sys.stderr)
    raise SystemExit(2) from missing


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0, or 2 after an error and 130 after Ctrl-C, either with one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # anywhere in the line, as one adds it to the end after an error
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
            code = typer.main.get_command(app).main(given, prog_name="stochbn", standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        if debug:
            raise
        print(f"Error: {_explain(error)}", file=sys.stderr)
        code = 2
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    if code == 130:
        resumes = given[0] in ("demo", "train", "evaluate", "reproduce", "study")
        print("Interrupted; run the same command to resume." if resumes else "Interrupted.", file=sys.stderr)
    elif not code and not {"data", "--help", "--version"} & set(given):
        say(f"Done in {minutes} min {seconds} s.")
    sys.exit(code or 0)


def _explain(error: Exception) -> str:
    """Puts an error on one line. Only one that nobody foresaw is given with its type."""
    # The command-line parser's errors are known by this method; their class has moved between versions of typer.
    text = " ".join(str(getattr(error, "format_message", lambda: error)()).split())
    text, _, of_the_library = text.partition(" Pass call= ")  # advice that has no option here
    if of_the_library:
        text += " Let the factory return a model that takes such batches."
    text, _, of_the_library = text.partition(" Pass target=")
    if of_the_library:
        text += " Give the data labels: y in the file, or the second of what the data set yields."
    if isinstance(error, ImportError) and error.name in EXTRA:
        return f"{text}. {INSTALL}"
    foreseen = isinstance(error, (ValueError, TypeError, OSError, ImportError)) or hasattr(error, "format_message")
    ours = type(error).__module__.startswith("stochbn.")
    return text if foreseen or ours else f"{type(error).__name__}: {text} (--debug shows the traceback)"


if __name__ == "__main__":
    main()
