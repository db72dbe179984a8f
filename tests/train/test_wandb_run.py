"""wandb for real, without its server: the files it leaves, and what happens when nobody answers."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megads.config.schema import Config
from megads.launch.signals import StopRequest
from megads.train import wandb_run
from megads.train.wandb_run import WandbRun, unreachable
from tests.distributed import Workers
from tests.train.test_sinks import scalars
from tests.train.wandb_files import Start, files
from tests.training import column, run_training, tiny_config, write_tokens

SILENT_S = 0.3


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb knows no key and no settings, whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home/netrc"))
    monkeypatch.setattr(wandb_run, "PROBE_S", SILENT_S)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def answering_server() -> Iterator[str]:
    """A server that knows no page."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def config_of(tmp_path: Path, *words: str) -> Config:
    return tiny_config(tmp_path / "my run", "", "gpt", "logging.loggers=wandb", *words)


def recorded(config: Config, run_id: str = "0123abcd") -> tuple[list[str], Start]:
    """One start that records a line: the notes it gave, and what is in its file."""
    notes: list[str] = []
    Path(config.run.dir).mkdir(exist_ok=True)
    run = WandbRun(config, run_id, notes.append)
    run.rewind(0, 0)
    run.record({"step": 1, "loss": 2.5})
    run.close(0)
    return notes, Start(files(Path(config.run.dir))[-1])


def without_hurry(rank: int) -> Callable[[], None]:
    """The end of a run waits for its loggers, however busy the machine is."""
    from megads.train import metrics

    patch = pytest.MonkeyPatch()
    patch.setattr(metrics, "CLOSE_S", 60.0)
    return patch.undo


def test_a_run_that_goes_on_is_one_run_in_its_files(tmp_path: Path, workers: Workers) -> None:
    """Two starts; the second makes step 4 again, which the first had made but not saved."""
    data = write_tokens(tmp_path / "tokens")
    words = ["logging.loggers=[wandb,tensorboard]", "logging.wandb_mode=offline", "eval.every=4"]
    words += ["checkpoint.every=3", "data.valid_fraction=0.3", "optim.total=6", "eval.steps=1"]
    for steps in (4, 6):
        words_now = [*words, f"train.steps={steps}"]
        lines = run_training(
            workers, tiny_config(tmp_path / "run", data, "gpt", *words_now), without_hurry
        )
    first, second = map(Start, files(tmp_path / "run"))
    assert first.id == second.id == json.loads((tmp_path / "run/wandb-run.json").read_text())["id"]
    assert (first.project, first.name) == ("megads", "run")
    assert first.config["train"]["steps"] == 4 and second.config["optim"]["total"] == 6
    assert first.axes == second.axes == {"step": "", "*": "step"}
    assert first.column("step") == [1, 2, 3, 4] and second.column("step") == [4, 5, 6]
    assert first.column("_step") == [1, 2, 3, 4] and second.column("_step") == [5, 6, 7]
    assert [*first.column("loss")[:3], *second.column("loss")] == column(lines, "loss").tolist()
    assert second.column("val_loss") == column(lines, "val_loss").tolist()
    times = [line["phases_s"]["forward"] for line in lines if "loss" in line]
    assert second.column("phases_s/forward") == times[3:]
    assert first.status == second.status == 0
    shown = scalars(tmp_path / "run/tensorboard")
    assert [step for step, _ in shown["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in shown["loss"]] == pytest.approx(column(lines, "loss").tolist())


def test_what_the_user_has_set_for_wandb_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_RUN_ID", "their-id")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(tmp_path, "logging.wandb_project=p", "logging.wandb_mode=online")
    notes, start = recorded(config)
    assert (start.project, start.id, start.name) == ("theirs", "their-id", "my run")
    assert notes == [
        f"wandb: offline; wandb sync '{config.run.dir}/wandb'/offline-run-* uploads it later"
    ]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that runs are started with; none is really started."""
    given: list[Any] = []

    def init(config: dict[str, Any], settings: Any) -> Any:
        given.append(settings)
        return SimpleNamespace(
            disabled=False, dir="/a/b/c", step=0, define_metric=lambda *args, **words: None
        )

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.setup", lambda settings: None)
    return given


def test_the_id_stays_though_nothing_was_saved(tmp_path: Path, settings: list[Any]) -> None:
    config = config_of(tmp_path, "logging.wandb_mode=offline", "logging.wandb_entity=team")
    (tmp_path / "my run").mkdir()
    for run_id in ("of the first start", "of the second"):
        WandbRun(config, run_id, lambda note: None)
    assert [start.run_id for start in settings] == ["of the first start"] * 2
    assert settings[0].resume == "allow" and settings[0].entity == "team"


def test_no_line_is_put_into_a_row_that_the_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on at 101; how far ahead it is was lost, as with a start that ended early."""
    logged: list[tuple[int, int]] = []

    def init(**words: Any) -> Any:
        return SimpleNamespace(
            disabled=False,
            dir="/a/b/c",
            step=101,
            define_metric=lambda *args, **words: None,
            log=lambda line, step: logged.append((line["step"], step)),
        )

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.setup", lambda settings: None)
    (tmp_path / "my run").mkdir()
    for start in range(2):
        run = WandbRun(config_of(tmp_path, "logging.wandb_mode=offline"), "id", lambda note: None)
        run.rewind(50 + start, 50)
        for step in (51, 52, 52):
            run.record({"step": step + start, "loss": 1.0})
    assert logged == [(51, 101), (52, 102), (52, 102), (52, 102), (53, 103), (53, 103)]


def test_stopping_in_the_web_page_is_a_request_to_stop(tmp_path: Path, settings: list[Any]) -> None:
    (tmp_path / "my run").mkdir()
    WandbRun(config_of(tmp_path, "logging.wandb_mode=offline"), "id", lambda note: None)
    with StopRequest() as stop:
        asking = threading.Thread(target=settings[0].stop_fn)
        asking.start()
        asking.join()
        assert stop.requested


def test_wandb_can_be_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    notes: list[str] = []
    (tmp_path / "my run").mkdir()
    run = WandbRun(config_of(tmp_path), "0123abcd", notes.append)
    run.rewind(0, 0)
    run.record({"step": 1, "loss": 2.5})
    run.close(0)
    assert notes == ["wandb: off, as WANDB_MODE=disabled"]
    assert not (tmp_path / "my run/wandb").exists()


def test_without_a_network_a_run_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    notes, start = recorded(config_of(tmp_path, "logging.wandb_name=mine"))
    assert f"offline, because {silent_server[7:]} does not answer (timed out)" in notes[0]
    assert (start.id, start.name, start.column("loss")) == ("0123abcd", "mine", [2.5])


def test_without_a_key_a_run_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering_server: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", answering_server)
    notes, start = recorded(config_of(tmp_path))
    assert "offline, because No API key configured" in notes[0]
    assert start.column("loss") == [2.5]


def test_a_start_online_that_fails_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    notes, start = recorded(config_of(tmp_path, "logging.wandb_mode=online"))
    assert len(notes) == 1 and "wandb: offline, because Failed to get resume status" in notes[0]
    assert (start.id, start.column("loss")) == ("0123abcd", [2.5])


def test_who_answers(silent_server: str, answering_server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert unreachable(answering_server) is None
    assert "Connection refused" in str(unreachable(f"http://127.0.0.1:{port}"))
    assert "does not answer" in str(unreachable("http://no-such-host.invalid"))
    started = time.monotonic()
    assert "timed out" in str(unreachable(silent_server))
    assert time.monotonic() - started < 10 * SILENT_S


KILLED = """
import os, signal, subprocess, sys
from megads.config.decode import load_config
from megads.train.wandb_run import WandbRun
run = WandbRun(load_config(sys.argv[1]), "0123abcd", lambda note: None)
run.rewind(0, 0)
run.record({"step": 1, "loss": 1.0})
subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb"])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_other_process(tmp_path: Path) -> None:
    from megads.config.decode import to_yaml

    config = config_of(tmp_path, "logging.wandb_mode=offline")
    (tmp_path / "my run").mkdir()
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    helpers = [int(word) for word in done.stdout.split()]
    assert helpers
    deadline = time.monotonic() + 30
    while alive := [pid for pid in helpers if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
