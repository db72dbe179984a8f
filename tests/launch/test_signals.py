"""Stop requests."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megads.launch.signals import StopRequest
from megads.launch.supervisor import Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_remembered_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a second one does no harm
        assert stop.requested
    assert signal.getsignal(number) is before


def test_an_inner_request_knows_of_earlier_signals() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequest() as inner:
            assert inner.requested
    with StopRequest() as later:
        assert not later.requested


def test_a_time_limit_is_a_request() -> None:
    with StopRequest(time.time() + 0.2) as stop:
        assert not stop.requested
        time.sleep(0.25)
        assert stop.requested


@pytest.mark.parametrize("is_ignored", [False, True])
def test_under_nohup_the_end_of_the_session_is_none_of_the_run(is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with Signals().installed() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.take() == ([] if is_ignored else [signal.SIGHUP])
    finally:
        signal.signal(signal.SIGHUP, before)
