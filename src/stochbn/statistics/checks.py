"""What arguments must be, and how errors name them."""

import operator
from collections.abc import Iterable
from typing import Any


def check_whole(name: str, value: Any, least: int) -> int:
    """Returns a whole number of any integer type, or raises."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Expected {name} to be a whole number, got {value!r}. Pass an int.") from None
    if number < least:
        raise ValueError(f"Expected {name} of at least {least}, got {value}. Pass a larger one, or leave it out.")
    return number


def listing(names: Iterable[str], most: int = 6) -> str:
    """Quotes names for an error message, of many the first few and the last ones.

    Examples:
        >>> listing("abcdefgh")
        "'a', 'b', 'c', 'd', 2 more, 'g', 'h'"
    """
    names = list(map(repr, names))
    if len(names) <= most:
        return ", ".join(names)
    if most < 6:  # too few to spare some for the end
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return ", ".join([*names[: most - 2], f"{len(names) - most} more", *names[-2:]])
