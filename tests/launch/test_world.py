"""How many processes to start here, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from megads.config.compose import compose
from megads.config.schema import Config
from megads.errors import ConfigError, LayoutError
from megads.launch.machine import Machine
from megads.launch.world import check_disk, check_fits, local_layout
from megads.parallel.layout import ParallelLayout

CPU = Machine(gpus=0, cores=4, free_bytes=8 * 10**9)
EIGHT_GPUS = Machine(gpus=8, cores=64, free_bytes=8 * 10**9)


@pytest.fixture(scope="module")
def config():
    made: dict[tuple[str, ...], Config] = {}
    return lambda *overrides: made.setdefault(overrides, compose(overrides))


def _refusal(config: Config, machine: Machine, arguments: list[str]) -> str:
    with pytest.raises(LayoutError) as refused:
        check_fits(config, local_layout(config, machine), machine, arguments)
    assert refused.value.exit_status == 2
    return str(refused.value)


def test_processes_started_here(config) -> None:
    assert local_layout(config("parallel=tp2pp2"), CPU).world_size == 4
    assert local_layout(config("parallel=tp2pp2dp3"), CPU).dp == 3
    assert local_layout(config("parallel=tp2pp2"), EIGHT_GPUS).dp == 2
    assert local_layout(config("parallel=tp2pp2dp1"), EIGHT_GPUS).world_size == 4
    assert local_layout(config("parallel=tp3"), EIGHT_GPUS).dp == 2
    assert local_layout(config("parallel=tp2", "launch.backend=gloo"), EIGHT_GPUS).dp == 1


def test_small_models_run_on_a_cpu(config) -> None:
    for name in ("single", "tp2pp2", "tp2pp2dp2"):
        tiny = config(f"parallel={name}")
        check_fits(tiny, local_layout(tiny, CPU), CPU, [])


def test_too_little_memory_is_refused(config) -> None:
    arguments = ["model=gpt-13b", "parallel=tp8pp4", "run.dir=/data/my run"]
    text = _refusal(config("model=gpt-13b", "parallel=tp8pp4"), CPU, arguments)
    first, *rest = text.splitlines()
    assert "tp=8 x pp=4 x dp=1 needs 32 devices; this machine has no GPU" in first
    assert "gpt-13b; 8.0 GB is free" in first
    commands = [line.strip() for line in rest if line.startswith("    ")]
    torchrun, srun, here = commands
    assert torchrun.startswith("torchrun --nnodes=4 --nproc-per-node=8 ")
    assert torchrun.endswith("model=gpt-13b parallel=tp8pp4 'run.dir=/data/my run'")
    assert srun.startswith("srun --nodes=4 --ntasks-per-node=8 ")
    assert here == "megads-train model=gpt-tiny parallel=tp2pp2"


def test_unknown_memory_refuses_nothing(config) -> None:
    large = config("model=gpt-13b", "parallel=tp8pp4")
    machine = Machine(gpus=0, cores=4, free_bytes=None)
    check_fits(large, local_layout(large, machine), machine, [])


def test_too_few_gpus_are_refused_and_enough_are_not(config) -> None:
    text = _refusal(config("parallel=tp4pp4"), EIGHT_GPUS, ["parallel=tp4pp4"])
    assert "needs 16 devices; this machine has 8 GPUs" in text
    assert "--nnodes=2 --nproc-per-node=8" in text
    assert "launch.backend=gloo" in text
    large = config("model=gpt-13b", "parallel=tp8")
    check_fits(large, local_layout(large, EIGHT_GPUS), EIGHT_GPUS, [])


def test_odd_worlds_are_spread_evenly_over_nodes(config) -> None:
    text = _refusal(config("parallel=tp4pp3"), EIGHT_GPUS, [])
    assert "--nnodes=2 --nproc-per-node=6" in text


def test_deciding_needs_no_torch() -> None:
    code = (
        "import sys; from megads.config.compose import compose; from megads.launch.env import *; "
        "from megads.launch.world import *; c = compose(['parallel=tp2pp2']); m = this_machine(); "
        "check_fits(c, local_layout(c, m), m, []); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_state_files_that_do_not_fit_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["parallel=dp4zero3", "parallel.offload=nvme", f"parallel.offload_path={tmp_path}"]
    config, layout = compose(words), ParallelLayout(dp=4)
    check_disk(config, layout)
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"of 4 processes needs 0\.0 GB") as refusal:
        check_disk(config, layout)
    assert f"parallel.offload_path={tmp_path}" in str(refusal.value)
    check_disk(compose(["parallel=dp4zero3"]), layout)
