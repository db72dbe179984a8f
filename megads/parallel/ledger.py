"""Counting bytes that come and go. Pure: no torch."""

from __future__ import annotations


class Ledger:
    """Bytes of one kind that are held, now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now
