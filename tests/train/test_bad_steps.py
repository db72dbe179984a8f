"""Bad steps in whole runs: a rewind ends as a run that never had the samples, however it went."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megads.cli.audit import main as audit_command
from megads.config.schema import TrainConfig
from megads.data.audit import audit
from megads.data.indexed import TokenWriter
from megads.data.ledger import LEDGER, Rewind, read_rewinds
from megads.data.loader import open_loader
from megads.data.prepare import prepare_data
from megads.errors import BadStepError, DataError
from megads.train.bad_steps import handle_bad_step
from megads.train.guard import Guard
from tests.data.test_streaming import samples_seen, spy
from tests.distributed import Workers
from tests.training import (
    command_words,
    read_checkpoint,
    read_metrics,
    run_training,
    tiny_config,
    train_statuses,
)

SEQ, BATCH, STRANGE = 16, 4, 60
"""Token ids from STRANGE on are in one sample only, in all others the next one is easily told."""
LIMIT_S = 120
COMMON = [
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=2",
    "train.steps=14",
    "optim.lr=1e-2",
    "optim.warmup=1",
    "optim.total=40",
    "data.valid_fraction=0",
    "checkpoint.every=4",
    "checkpoint.save_last=true",
]
SPIKE = [
    "train.spike=rewind",
    "train.spike_window=2",
    "train.spike_loss=1.2",
    "train.spike_norm=null",
]
NAN = ["train.nonfinite=rewind"]


class Poisoned(NamedTuple):
    """Token files of which one sample is not like the others, and the step that reads it."""

    data: str
    step: int

    def without(self, batches: int = 1) -> str:
        """The setting that leaves out so many global batches, the last of them the bad one."""
        return f"data.skip=[[{(self.step - batches) * BATCH},{self.step * BATCH}]]"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    """Where a sample comes depends on the whole content, so it is looked for."""
    folder = tmp_path_factory.mktemp("data")
    for sample in range(200):
        tokens = np.arange(200 * SEQ + 1) % 5
        # But for its ends, which its neighbours have too.
        tokens[sample * SEQ + 1 : (sample + 1) * SEQ] = STRANGE + np.arange(1, SEQ) ** 2 % 40
        prefix = folder / f"tokens-{sample}"
        with TokenWriter(prefix, np.uint16) as writer:
            writer.add_document(tokens)
        config = tiny_config(folder, str(prefix), "gpt", *COMMON)
        loader = open_loader(config, prepare_data(config), "train")
        step = loader.sample_ids(0, 200).index(sample) // BATCH + 1
        loader.close()
        if step == 10:
            return Poisoned(str(prefix), step)
    raise AssertionError("no sample comes in step 10")


def poison(rank: int, *more: Any) -> Callable[[], None]:
    """The gradients of a rank that reads a strange token are NaN; then `more` is called, if any."""
    from megads.train.build import RunParts
    from megads.zero.grads import BucketReducer

    read, start, spoils = RunParts.microbatches, BucketReducer.start, [False]

    def microbatches(self: RunParts, batch: Any) -> Any:
        found = read(self, batch)
        spoils[0] = any(bool((m.tokens >= STRANGE).any()) for m in found)
        return found

    def spoiled_start(self: BucketReducer) -> None:
        if spoils[0]:
            self.bucket.entries[0].grad.view(-1)[0] = math.nan
        start(self)

    RunParts.microbatches = microbatches  # type: ignore[method-assign]
    BucketReducer.start = spoiled_start  # type: ignore[method-assign]
    undo_more = more[0](rank, *more[1:]) if more else lambda: None

    def undo() -> None:
        RunParts.microbatches = read  # type: ignore[method-assign]
        BucketReducer.start = start  # type: ignore[method-assign]
        undo_more()

    return undo


def assert_same_run(run: Path, other: Path) -> None:
    """Every step of the one as in the other, and the same parameters and moments at its end."""
    lines, want = read_metrics(run), read_metrics(other)
    for name in ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped"):
        assert [line[name] for line in lines] == [line[name] for line in want], name
    ends = [r / f"checkpoints/step-{lines[-1]['step']}" for r in (run, other)]
    tensors, wanted = map(read_checkpoint, ends)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def rewinds_of(run: Path) -> list[Rewind]:
    return audit(run).rewinds


@pytest.mark.parametrize(
    ("layout", "kind", "back", "batches"),
    [
        ("parallel=dp2", "spike", 8, 1),
        ("parallel=dp2", "nan", 8, 1),
        ("parallel=tp2", "spike", 4, 4),  # step-8 has been trained on what is to be left out
        ("parallel=pp2", "nan checkpoint.every=50", 0, 1),  # back to the beginning
        ("parallel=dp2zero3 parallel.offload=nvme", "nan checkpoint.keep=1", 8, 3),  # none so old
    ],
)
def test_a_rewind_ends_as_a_run_without_the_samples(
    tmp_path: Path, poisoned: Poisoned, workers: Workers, layout: str, kind: str, back: int,
    batches: int,
) -> None:  # fmt: skip
    kind, *more = kind.split()
    words = [*COMMON, *layout.split(), *more]
    left_out = min(batches, poisoned.step - back)
    rewinding = [*(SPIKE if kind == "spike" else NAN), f"train.rewind_skip={batches}"]
    config = tiny_config(tmp_path / "a", poisoned.data, "gpt", *words, *rewinding)
    run_training(workers, config, *([poison] if kind == "nan" else []))
    plain = tiny_config(tmp_path / "b", poisoned.data, "gpt", *words, poisoned.without(left_out))
    run_training(workers, plain)
    assert_same_run(tmp_path / "a", tmp_path / "b")

    (rewind,) = rewinds_of(tmp_path / "a")
    assert (rewind.step, rewind.to_step) == (poisoned.step, back)
    last = poisoned.step * BATCH
    assert (rewind.first, rewind.after) == (last - left_out * BATCH, last)
    assert audit(tmp_path / "a").problems == []
    old = (tmp_path / "a/metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in old] == list(range(back + 1, poisoned.step + 1))
    assert math.isnan(json.loads(old[-1])["grad_norm"]) == (kind == "nan")
    assert not list((tmp_path / "a/checkpoints").glob(".*")), "what was set aside is gone by now"


def dies_after_a_rewind(rank: int) -> Callable[[], None]:
    """The run ends where it would go on; only what is in files is left of it."""
    from megads.train import bad_steps

    original = bad_steps.continue_plan

    def stop(*_: Any) -> list[str]:
        raise BadStepError("killed")

    bad_steps.continue_plan = stop

    def undo() -> None:
        bad_steps.continue_plan = original

    return undo


def forgets_rewinds(rank: int) -> Callable[[], None]:
    """Negative control: a run that goes on without looking what was left out."""
    from megads.train import checkpointing

    original = checkpointing.earlier_rewinds
    checkpointing.earlier_rewinds = lambda *_: []

    def undo() -> None:
        checkpointing.earlier_rewinds = original

    return undo


def test_whoever_goes_on_after_a_rewind_leaves_the_samples_out(
    tmp_path: Path, poisoned: Poisoned, workers: Workers
) -> None:
    """Killed right after it, without a new checkpoint, and resumed twice; in another layout too."""
    a, back = tmp_path / "a", ["train.rewind_skip=4", "checkpoint.keep=-1"]

    def go(words: list[str], *before: Any) -> list[Any]:
        config = tiny_config(a, poisoned.data, "gpt", *COMMON, *SPIKE, *back, *words)
        return train_statuses(workers, config, *before)

    def saved() -> list[int]:
        return sorted(int(path.name[5:]) for path in (a / "checkpoints").glob("step-*"))

    assert set(go(["parallel=dp2"], dies_after_a_rewind)) == {"BadStepError: killed"}
    assert saved() == [0, 4], "step-8 has been trained on what is left out now"
    assert go(["train.steps=5"]) == [0]
    assert go(["train.steps=13"]) == [0]
    assert len(rewinds_of(a)) == 1 and audit(a).problems == []
    words = [*COMMON, "train.steps=13", poisoned.without(4)]
    want = run_training(workers, tiny_config(tmp_path / "b", poisoned.data, "gpt", *words))
    for got, line in zip(read_metrics(a), want, strict=True):
        assert got["loss"] == pytest.approx(line["loss"], rel=1e-6)

    # From an older checkpoint, who does not know of the rewind meets the samples again.
    for step in saved()[2:]:
        (a / f"checkpoints/step-{step}").rename(a / f"step-{step}")
    assert go(["train.steps=11"], forgets_rewinds) == [0]
    assert len(read_rewinds(a / LEDGER, rewinds_of(a)[0].run)) == 2


def poison_all(rank: int, from_call: int) -> Callable[[], None]:
    """From one call on, every step is bad, whatever it reads."""
    from megads.train.guard import Guard

    judge, calls = Guard.judge, [0]

    def bad(self: Guard, loss: float, norm: float) -> Any:
        calls[0] += 1
        return judge(self, loss, math.nan if calls[0] >= from_call else norm)

    Guard.judge = bad  # type: ignore[method-assign]

    def undo() -> None:
        Guard.judge = judge  # type: ignore[method-assign]

    return undo


def test_rewinds_are_bounded(tmp_path: Path, poisoned: Poisoned, workers: Workers) -> None:
    """Over restarts, too: a run that has made them all ends with the next bad step."""
    words = [*COMMON, *NAN, "parallel=dp2", "train.max_rewinds=2"]
    config = tiny_config(tmp_path, poisoned.data, "gpt", *words)
    (message, other) = train_statuses(workers, config, poison_all, 6)
    assert message == other
    for part in (
        "step 5 is not finite",
        "train.max_rewinds=2 and 2 were made",
        "from step 6 (nonfinite",
        "to step 4, without positions 20 to 23",
        "from step 5",
        "to step 4, without positions 16 to 19",
        "data.skip",
    ):
        assert part in str(message)
    assert len(rewinds_of(tmp_path)) == 2 and audit(tmp_path).problems == []
    for message in train_statuses(workers, config, poison_all, 1):
        assert "step 5 is not finite" in str(message) and "2 were made" in str(message)
    more = tiny_config(tmp_path, poisoned.data, "gpt", *words, "train.max_rewinds=3")
    assert train_statuses(workers, more, poison_all, 100) == [0, 0]
    assert len(rewinds_of(tmp_path)) == 2 and audit(tmp_path).problems == []
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 15))


def test_a_spike_is_skipped(tmp_path: Path, poisoned: Poisoned, workers: Workers) -> None:
    """Also right after a resume. Its samples are consumed; the loss scale has no part in it."""
    words = [*COMMON, *SPIKE, "train.spike=skip", "precision=fp16"]
    for steps in (9, 14):
        config = tiny_config(tmp_path, poisoned.data, "gpt", *words, f"train.steps={steps}")
        lines = run_training(workers, config)
    assert [line["skipped"] for line in lines] == [0] * 9 + [1] * 5
    assert len({line["loss_scale"] for line in lines}) == 1
    state = json.loads((tmp_path / "checkpoints/step-14/manifest.json").read_text())["state"]
    assert state["optimizer_updates"] == 13 and state["train"]["samples"] == 14 * BATCH
    assert lines[9]["loss"] not in state["guard"]["losses"]


def test_a_run_without_enough_samples_left_says_so(
    tmp_path: Path, poisoned: Poisoned, workers: Workers
) -> None:
    words = [*COMMON, *SPIKE, "data.limits=56"]
    config = tiny_config(tmp_path, poisoned.data, "gpt", *words)
    with pytest.raises(DataError, match="needs 60 samples, 4 skipped ones included"):
        raise_data_error(workers, config)


def raise_data_error(workers: Workers, config: Any) -> None:
    for text in workers(1).run(data_error_of, config, timeout=60):
        raise DataError(text)


def data_error_of(rank: int, world: int, config: Any) -> str:
    from tests.training import train_rank

    try:
        return str(train_rank(rank, world, config, None))
    except DataError as error:
        return str(error)


def parts_of(precision: str = "fp32", *, exhausted: bool = False, **train: Any) -> Any:
    """As much of a run as is looked at when a step does not lead to a rewind."""
    config = TrainConfig.model_validate(train)
    return SimpleNamespace(
        config=SimpleNamespace(train=config),
        scaler=SimpleNamespace(dynamic=precision == "fp16", exhausted=exhausted),
        guard=Guard(config),
        rewinds=[],
        state=SimpleNamespace(step=7),
    )


def result_of(verdict: str) -> Any:
    return SimpleNamespace(verdict=verdict, loss=9.5, grad_norm=3.25)


@pytest.mark.parametrize(
    ("verdict", "parts", "message"),
    [
        ("good", parts_of(nonfinite="stop", spike="stop"), None),
        ("nonfinite", parts_of(nonfinite="skip", spike="stop"), None),
        ("spike", parts_of(nonfinite="stop", spike="skip"), None),
        ("nonfinite", parts_of("fp16"), None),
        ("nonfinite", parts_of("fp16", exhausted=True), "step 7 is not finite: loss 9.5"),
        ("nonfinite", parts_of(spike="skip"), "train.nonfinite=skip leaves"),
        ("spike", parts_of("fp16", spike="stop"), "step 7 is a spike.*train.spike=skip leaves"),
        ("spike", parts_of(spike="rewind", max_rewinds=0), "max_rewinds=0 allows no rewind"),
    ],
)
def test_what_each_setting_does(verdict: str, parts: Any, message: str | None) -> None:
    if message is None:
        assert not handle_bad_step(parts, result_of(verdict))
        return
    with pytest.raises(BadStepError, match=message):
        handle_bad_step(parts, result_of(verdict))


def test_spikes_that_do_not_end_are_not_skipped_for_ever() -> None:
    parts = parts_of(spike="skip", spike_window=3)
    for loss in (1.0, 2.0, 3.0):
        assert parts.guard.judge(loss, 0.5) == "good"
    for number in (1, 2, 3):
        assert parts.guard.judge(9.5, 3.25) == "spike"
        if number < 3:
            assert not handle_bad_step(parts, result_of("spike"))
    usual = "medians of the last 3 good steps: loss 2, gradient norm 0.5"
    with pytest.raises(BadStepError, match=f"{usual}.*3 spikes in a row.*spike_loss=2.0"):
        handle_bad_step(parts, result_of("spike"))


def test_a_stream_goes_on_without_the_samples(tmp_path: Path, workers: Workers) -> None:
    """Also when it dies after the rewind and goes on with another number of data-parallel ranks."""
    pytest.importorskip("datasets", reason="needs the packages of megads[data]")
    texts = ["abcdeabcdeabcde"] * 80  # and the end of the document: a lane's samples are its texts
    texts[9 * BATCH + 2] = "a" + "".join(map(chr, range(65, 79)))
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [*COMMON, "data.source=streaming", "model.vocab_size=263", "data.lanes=4"]

    def run(name: str, *more: str, before: Any = None) -> dict[int, Any]:
        folder = tmp_path / f"{name}-samples-{len(more)}"
        folder.mkdir()
        config = tiny_config(tmp_path / name, str(path), "gpt", *words, *more)
        statuses = train_statuses(workers, config, before or spy, str(folder))
        assert set(statuses) == {"BadStepError: killed" if before else 0}
        return samples_seen(folder)

    plain = list(run("plain", "train.steps=15").values())
    assert [n for n, rows in enumerate(plain, 1) if any(66 in row for row in rows)] == [10]
    run("rewound", *SPIKE, "parallel=dp2", before=spy_and_die)
    seen = run("rewound", *SPIKE)
    assert list(seen.values()) == [plain[8], *plain[10:]]
    assert [line["step"] for line in read_metrics(tmp_path / "rewound")] == list(range(1, 15))


def spy_and_die(rank: int, folder: str) -> Callable[[], None]:
    undo = spy(rank, folder), dies_after_a_rewind(rank)
    return lambda: [u() for u in undo] and None


def test_the_command_killed_after_a_rewind_goes_on_without_the_samples(
    tmp_path: Path,
    poisoned: Poisoned,
    workers: Workers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = str(Path(sys.executable).with_name("megads-train"))
    words = [*COMMON, "parallel=tp2", "checkpoint.every=8", "train.steps=24"]
    given = command_words(tmp_path / "a", poisoned.data, "gpt", *words, *SPIKE)
    ledger, deadline = tmp_path / "a" / LEDGER, time.monotonic() + LIMIT_S
    killed = subprocess.Popen([command, *given], stdout=subprocess.DEVNULL, start_new_session=True)
    while not (ledger.exists() and b"rewind" in ledger.read_bytes()):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(timeout=LIMIT_S) == -signal.SIGKILL, "it was still training"
    done = subprocess.run(
        [command, *given], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert audit_command([str(tmp_path / "a")]) == 0
    table = capsys.readouterr().out
    assert "rewound from step 10 (spike: loss" in table and len(rewinds_of(tmp_path / "a")) == 1
    assert f"to step 8, without positions {9 * BATCH} to {10 * BATCH - 1}" in table

    plain = tiny_config(tmp_path / "b", poisoned.data, "gpt", *words, poisoned.without())
    want = run_training(workers, plain)
    for got, line in zip(read_metrics(tmp_path / "a"), want, strict=True):
        assert got["loss"] == pytest.approx(line["loss"], rel=1e-6)
    ends = [read_checkpoint(tmp_path / name / "checkpoints/step-24") for name in "ab"]
    for key, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][key], rtol=0, atol=1e-6)
