"""A run of Weights & Biases that stays the same over stops and crashes, with or without network."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megads.config.schema import Config
from megads.launch.env import variables
from megads.train.sinks import Line, Tell, numbers

if TYPE_CHECKING:
    from wandb import Run

PROBE_S = 3.0
"""How long the server may take to answer when a run with wandb_mode=auto starts."""
STATE = "wandb-run.json"
"""Beside wandb's own files in run.dir: the id of the run, and how far it is ahead of our steps."""


class WandbRun:
    """A sink that opens the run when it is made, which may take long.

    What does not work online is kept in files of run.dir, and `tell` says how to upload them.
    wandb's own step never goes back, so it is ours plus the number of steps that were made again;
    charts have our step as their axis. A stop that is asked for in its web page is the same as
    SIGTERM. Variables of the environment that begin with WANDB_ win over all settings made here.
    """

    def __init__(self, config: Config, run_id: str, tell: Tell) -> None:
        """`run_id` names the run unless it has a name from before."""
        directory = Path(config.run.dir)
        self._file = directory / STATE
        state: dict[str, Any] = {"id": run_id, "ahead": 0}
        if self._file.exists():
            state |= json.loads(self._file.read_text(encoding="utf-8"))
        self._id, self._ahead = str(state["id"]), int(state["ahead"])
        self._keep()
        self._run = _open(config, self._id, tell)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._has_begun = False

    def rewind(self, step: int, made: int) -> None:
        self._ahead += max(0, made - step)
        self._keep()

    def record(self, line: Line) -> None:
        step = int(line["step"])
        if not self._has_begun:
            # The server may have more than we know of, from a start that ended before it said so;
            # lines of one step would become one.
            self._has_begun, self._ahead = True, max(self._ahead, self._run.step - step)
            self._keep()
        self._run.log(numbers(line), step=step + self._ahead)

    def close(self, status: int) -> None:
        """Return when everything is uploaded, or is in the files of a run that is offline."""
        import wandb

        self._run.finish(exit_code=status)
        wandb.teardown()

    def _keep(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"id": self._id, "ahead": self._ahead}), encoding="utf-8")
        temporary.replace(self._file)


def _open(config: Config, run_id: str, tell: Tell) -> Run:
    """Start the run or go on with it: online if that is wanted and works, else in files."""
    import wandb

    mode, why = variables("WANDB_").get("WANDB_MODE", config.logging.wandb_mode), None
    if mode == "auto":
        why = unreachable(wandb.setup(wandb.Settings(silent=True)).settings.base_url)
        mode = "online" if why is None else "offline"
    if mode in ("online", "run"):
        try:
            run = _start(config, run_id, mode)
        except Exception as error:
            why, mode = str(error).strip().partition("\n")[0], "offline"
            wandb.teardown()  # until then the id counts as in use
        else:
            tell(f"wandb: {run.url}")
            return run
    run = _start(config, run_id, mode)
    if run.disabled:
        tell(f"wandb: off, as WANDB_MODE={mode}")
    else:
        folder = shlex.quote(str(Path(run.dir).parent.parent))
        because = f", because {why}" if why else ""
        tell(f"wandb: offline{because}; wandb sync {folder}/offline-run-* uploads it later")
    return run


def _start(config: Config, run_id: str, mode: str) -> Run:
    import wandb

    logging, given = config.logging, variables("WANDB_")
    ours = {
        "WANDB_PROJECT": ("project", logging.wandb_project),
        "WANDB_ENTITY": ("entity", logging.wandb_entity),
        "WANDB_NAME": ("run_name", logging.wandb_name or Path(config.run.dir).absolute().name),
        "WANDB_RUN_ID": ("run_id", run_id),
        "WANDB_RESUME": ("resume", "allow"),
        "WANDB_DIR": ("root_dir", config.run.dir),
        "WANDB_CONSOLE": ("console", "off"),
    }
    settings = {name: value for variable, (name, value) in ours.items() if variable not in given}
    wandb.setup(wandb.Settings(silent=True))  # its messages would break the display's line
    return wandb.init(
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(**settings, mode=mode, allow_val_change=True, stop_fn=_ask_to_stop),
    )


def _ask_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def unreachable(url: str) -> str | None:
    """Why no server answers at `url`, a proxy of the environment included; None if one does."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # whom to trust is for wandb to know
            return None
        return f"{urlsplit(url).netloc} does not answer ({reason})"
