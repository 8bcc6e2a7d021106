"""Where the commands print: text for people, or one JSON object for programs."""

import json
import math
from typing import Any

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Prints text as it is: no markup, no colours, and no line breaks that would cut a path in two."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def tell(summary: dict[str, Any]) -> None:
    """Prints what a command did as one JSON object, if `--json` has silenced the text."""
    if console.quiet:
        print(json.dumps(_without_nan(summary), ensure_ascii=False, default=str))


def printable(text: str) -> str:
    r"""Replaces what is no character, such as the codes that move a terminal's cursor; file names may hold any.

    Examples:
        >>> printable("a\x1b[2Jb")
        'a�[2Jb'
    """
    return "".join(character if character.isprintable() else "�" for character in text)


def _without_nan(value: Any) -> Any:
    """Puts null where JSON has no number: for NaN and infinity."""
    if isinstance(value, dict):
        return {str(key): _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
