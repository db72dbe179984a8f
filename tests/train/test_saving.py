"""Whole runs that save in the background, fail to, and find their checkpoints damaged."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megads.config.schema import Config
from megads.errors import CheckpointError, DamageError, LostRanksError
from megads.train import checkpointing
from tests.distributed import Workers
from tests.training import (
    pool_info,
    read_checkpoint,
    read_metrics,
    run_training,
    tiny_config,
    world_size,
    write_tokens,
)

ROOT = Path(__file__).resolve().parent.parent.parent
EVERY = ["checkpoint.every=1", "checkpoint.keep=-1", "train.steps=6", "optim.total=6"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def train_or_error(rank: int, world: int, config: Config, before: Any, *args: Any) -> int | str:
    """One rank of a run: its status, or the CheckpointError that it ends with."""
    from megads.train.loop import train

    undo = before(rank, *args) if before is not None else None
    try:
        return train(config, pool_info(rank, world))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if undo is not None:
            undo()


def ends(workers: Workers, config: Config, before: Any = None, *args: Any) -> list[int | str]:
    pool = workers(world_size(config))
    return pool.run(train_or_error, config, before, *args, timeout=120)


def steps(run: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*"))


def test_in_the_background_or_not_it_is_the_same_checkpoint(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    saved = {}
    for name in ("true", "false"):
        options = [*EVERY, f"checkpoint.async_save={name}", "parallel=dp2zero1"]
        run_training(workers, tiny_config(tmp_path / name, data, "gpt", *options))
        assert steps(tmp_path / name) == list(range(1, 7))
        saved[name] = [
            read_checkpoint(tmp_path / name / f"checkpoints/step-{n}") for n in range(1, 7)
        ]
    for one, other in zip(saved["true"], saved["false"], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    key = "param/blocks.0.mlp.up.weight"
    assert not torch.equal(saved["true"][0][key], saved["true"][1][key]), "every step differs"


def full_disk(rank: int, failing: int, step: int) -> Callable[[], None]:
    """Rank `failing` finds no space from `step` on, in that step's save alone."""
    from megads.checkpoint import io

    real = io.write_blocks

    def write_blocks(path: Path, parts: Any) -> Any:
        if rank == failing and f"step-{step}-" in path.parent.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, parts)

    io.write_blocks = write_blocks

    def undo() -> None:
        io.write_blocks = real

    return undo


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_disk_that_is_full_on_one_rank_stops_all(
    tmp_path: Path, data: str, workers: Workers, background: str
) -> None:
    config = tiny_config(
        tmp_path, data, "gpt", *EVERY, "parallel=dp2", f"checkpoint.async_save={background}"
    )
    for message in ends(workers, config, full_disk, 1, 3):
        assert isinstance(message, str)
        assert "saving step 3: rank 1: cannot write" in message
        assert "[Errno 28] No space left on device" in message
    assert steps(tmp_path) == [1, 2]
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    assert ends(workers, config) == [0, 0], "with space again it goes on"
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 7))


def test_with_continue_the_next_save_is_tried(tmp_path: Path, data: str, workers: Workers) -> None:
    options = [*EVERY, "parallel=dp2", "checkpoint.on_error=continue", "checkpoint.keep=2"]
    assert ends(workers, tiny_config(tmp_path, data, "gpt", *options), full_disk, 0, 3) == [0, 0]
    assert steps(tmp_path) == [5, 6]


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_last_save_has_to_succeed(
    tmp_path: Path, data: str, workers: Workers, background: str
) -> None:
    options = [*EVERY, "parallel=dp2", "checkpoint.on_error=continue"]
    options.append(f"checkpoint.async_save={background}")
    for message in ends(workers, tiny_config(tmp_path, data, "gpt", *options), full_disk, 0, 6):
        assert "saving step 6: rank 0" in str(message)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def damage(path: Path, how: str) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    match how:
        case "flip":
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)
        case "truncate":
            os.truncate(file, file.stat().st_size - 1)
        case "lost file":
            file.unlink()
        case "commit":
            (path / "COMMIT").unlink()
        case "manifest":
            (path / "manifest.json").write_bytes(b"{}")
        case "foreign":
            file.write_bytes((path.parent / "step-2" / file.name).read_bytes())


@pytest.mark.parametrize("how", ["flip", "truncate", "lost file", "commit", "manifest", "foreign"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, data: str, workers: Workers, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    options = [*EVERY, "parallel=dp2zero1"]
    straight = run_training(workers, tiny_config(tmp_path / "a", data, "gpt", *options))
    run_training(workers, tiny_config(tmp_path / "b", data, "gpt", *options, "train.steps=4"))
    damage(tmp_path / "b/checkpoints/step-4", how)
    config = tiny_config(tmp_path / "b", data, "gpt", *options)
    if how != "commit":
        stops = config.model_copy(
            update={"checkpoint": config.checkpoint.model_copy(update={"on_damage": "stop"})}
        )
        for message in ends(workers, stops):
            assert str(message).startswith(DamageError.__name__) and "step-4" in str(message)
            assert "checkpoint.on_damage=previous" in str(message)
        assert steps(tmp_path / "b") == [1, 2, 3, 4]
    resumed = run_training(workers, config)
    for name in ("step", "loss", "grad_norm", "lr", "samples"):
        assert [line[name] for line in resumed] == [line[name] for line in straight], name
    superseded = (tmp_path / "b/metrics.superseded.jsonl").read_text().splitlines()
    assert len(superseded) == 1, "only step 4 was made again"
    want = read_checkpoint(tmp_path / "a/checkpoints/step-6")
    got = read_checkpoint(tmp_path / "b/checkpoints/step-6")
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert not list((tmp_path / "b/checkpoints").glob(".*")), "what was set aside is gone by now"


def test_when_all_are_damaged_the_run_does_not_start_over(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    options = [*EVERY, "train.steps=2"]
    run_training(workers, tiny_config(tmp_path, data, "gpt", *options))
    for step in (1, 2):
        damage(tmp_path / f"checkpoints/step-{step}", "flip")
    (message,) = ends(workers, tiny_config(tmp_path, data, "gpt", *options, "train.steps=4"))
    assert "no checkpoint is whole" in str(message) and "step-1" in str(message)
    assert steps(tmp_path) == [1, 2]


def test_what_is_loaded_is_a_choice(tmp_path: Path, data: str, workers: Workers) -> None:
    """optimizer: weights and moments, but step 0 and the first sample."""
    saved = [*EVERY, "train.steps=4"]
    run_training(workers, tiny_config(tmp_path / "a", data, "gpt", *saved))
    lines = {}
    for what in ("all", "optimizer", "weights"):
        options = [f"checkpoint.load={tmp_path / 'a'}", f"checkpoint.load_what={what}"]
        config = tiny_config(
            tmp_path / what, data, "gpt", *options, "train.steps=5", "optim.schedule=constant"
        )
        lines[what] = run_training(workers, config)
    assert [line["step"] for line in lines["all"]] == [5]
    for what in ("optimizer", "weights"):
        assert [line["step"] for line in lines[what]] == [1, 2, 3, 4, 5]
    assert lines["optimizer"][0]["loss"] == lines["weights"][0]["loss"], "the same weights"
    assert lines["optimizer"][1]["loss"] != lines["weights"][1]["loss"], "other moments"


def test_a_state_of_other_software_is_taken_as_far_as_it_goes(
    tmp_path: Path, data: str, workers: Workers
) -> None:
    """Converted checkpoints know the progress and the number of updates only."""
    import json

    from megads.checkpoint.directory import commit_text

    options = [*EVERY, "train.steps=3"]
    straight = run_training(workers, tiny_config(tmp_path / "a", data, "gpt", *EVERY))
    run_training(workers, tiny_config(tmp_path / "b", data, "gpt", *options))
    checkpoint = tmp_path / "b/checkpoints/step-3"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("scaler", "data"):
        del manifest["state"][name]
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMMIT").write_text(commit_text(text))
    load = [f"checkpoint.load={checkpoint}", *EVERY]
    resumed = run_training(workers, tiny_config(tmp_path / "c", data, "gpt", *load))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in straight[3:]]


PAIRS = [
    ("parallel=tp2pp2", "parallel=dp2zero3 parallel.offload=nvme parallel.offload_budget_mb=0.05"),
    ("parallel=dp2zero2 parallel.bucket_mb=0.004", "parallel=pp2vpp2"),
    ("parallel=pp2vpp2", "parallel=tp2dp2zero1"),
    ("parallel=tp4", "parallel=pp2 parallel.offload=cpu parallel.zero=1"),
]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_next_loss_in_another_layout_is_the_same(
    tmp_path: Path, data: str, workers: Workers, family: str
) -> None:
    """Tied and untied, with grouped KV heads; moments tell in the loss after next."""
    options = ["train.steps=5", "optim.total=6"]
    straight = run_training(workers, tiny_config(tmp_path / "a", data, family, *options))
    for number, (first, then) in enumerate(PAIRS):
        run = tmp_path / f"{number}"
        saved = [*options, "train.steps=3", "checkpoint.save_last=true"]
        run_training(workers, tiny_config(run, data, family, *saved, *first.split()))
        lines = run_training(workers, tiny_config(run, data, family, *options, *then.split()))
        for got, want in zip(lines[3:], straight[3:], strict=True):
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-6 * want["loss"]), then


def test_kill_test_in_short(tmp_path: Path) -> None:
    """Real processes, killed and damaged: see scripts/kill_test.py for the long one."""
    short = ["--rounds", "2", "--steps", "15", "--seed", "4", "--layouts", "dp2zero3"]
    short += ["--directory", str(tmp_path)]  # nothing is mounted
    command = [sys.executable, str(ROOT / "scripts/kill_test.py"), *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout


def test_training_does_not_go_on_without_the_other_ranks() -> None:
    """checkpoint.on_error=continue is for a save that failed, not for a group that is dead."""
    notes: list[str] = []
    checkpoint = SimpleNamespace(on_error="continue")
    for error in (CheckpointError("full"), LostRanksError("gone")):

        def wait(error: CheckpointError = error) -> None:
            raise error

        parts: Any = SimpleNamespace(
            store=SimpleNamespace(wait=wait),
            config=SimpleNamespace(checkpoint=checkpoint),
            metrics=SimpleNamespace(note=notes.append),
        )
        if isinstance(error, LostRanksError):
            with pytest.raises(LostRanksError):
                checkpointing._wait(parts)
        else:
            checkpointing._wait(parts)
    assert len(notes) == 1 and "full" in notes[0]
