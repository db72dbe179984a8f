"""Kinds of values on command lines."""

from __future__ import annotations

import argparse


def positive(word: str) -> int:
    """A whole number of 1 or more."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


positive.__name__ = "number"  # what argparse calls a word that is none
