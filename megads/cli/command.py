"""What the commands have in common: how they show their help, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megads.errors import MegadsError

INTERRUPTED_STATUS = 130


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, but leaves texts of several lines, which are examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser whose help ends with `epilog`: examples."""
    return argparse.ArgumentParser(
        prog=name, description=description, epilog=epilog, formatter_class=_Formatter
    )


def guarded(name: str, work: Callable[[], int]) -> int:
    """The exit status of `work`; what is wrong with what the user gave becomes one message."""
    try:
        return work()
    except (MegadsError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, MegadsError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def new_file(word: str) -> Path:
    """A file to write, in a folder that there is."""
    path = Path(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def positive(word: str) -> int:
    """A whole number of 1 or more."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


positive.__name__ = "number"  # what argparse calls a word that is none


def natural(word: str) -> int:
    """A whole number of 0 or more."""
    number = int(word)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not 0 or more")
    return number


natural.__name__ = "number"
