"""Rank info from torchrun's and SLURM's variables, and the environment that workers get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megads.errors import LayoutError
from megads.launch import env
from megads.launch.machine import Machine, gpu_count

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {  # What a task of a job of two nodes with two tasks each sees.
    "SLURM_JOB_ID": "1204",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretend that processes here see this many GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(env, "this_machine", lambda environ=None: Machine(count, 4, 2**34))

    pretend(0)
    return pretend


def test_no_launcher(gpus) -> None:
    assert env.started({}) is None
    assert env.rank_info("auto", {}) is None


def test_torchrun(gpus) -> None:
    info = env.rank_info("auto", TORCHRUN)
    assert info is not None
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.node, info.device, info.backend, info.how) == (1, "cpu", "gloo", "torchrun")
    assert (info.master_addr, info.master_port, info.init_method) == ("head", 29500, "env://")
    local = env.rank_info("auto", {**TORCHRUN, env.LAUNCHER_PID: "77"})
    assert local is not None and local.how == "local"


def test_torchrun_variables_by_hand_must_be_complete(gpus) -> None:
    with pytest.raises(LayoutError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"):
        env.rank_info("auto", {"RANK": "0", "WORLD_SIZE": "2"})


def test_slurm(gpus) -> None:
    info = env.rank_info("auto", SLURM)
    assert info is not None
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 4, 1, 2)
    assert (info.node, info.how, info.master_addr) == (1, "slurm", "n07")
    assert info.init_method == f"tcp://n07:{info.master_port}"
    others = [env.rank_info("auto", {**SLURM, "SLURM_PROCID": str(r)}) for r in range(4)]
    assert {(o.master_addr, o.master_port) for o in others if o} == {("n07", info.master_port)}
    other_job = env.rank_info("auto", {**SLURM, "SLURM_JOB_ID": "1205"})
    assert other_job is not None and other_job.master_port != info.master_port


def test_another_start_of_a_slurm_job_is_another_job(gpus) -> None:
    """Processes of the start before may still be there, and hold its port."""
    places = [
        env.rank_info("auto", {**SLURM, **changes})
        for changes in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "2"})
    ]
    assert len({(place.master_port, place.job) for place in places if place}) == 3
    assert places[1] and places[1].job == "SLURM job 1204.0 (requeued 1 times)"


def test_slurm_master_can_be_set(gpus) -> None:
    info = env.rank_info("auto", {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert info is not None and info.init_method == "tcp://10.0.0.1:4000"


@pytest.mark.parametrize(
    "environ",
    [
        # A batch script: the job's variables, but no step.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # An interactive shell under srun: one task.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_shells_in_a_slurm_job_are_not_ranks(gpus, environ: dict[str, str]) -> None:
    assert env.rank_info("auto", environ) is None


def test_torchrun_inside_slurm_wins(gpus) -> None:
    info = env.rank_info("auto", {**SLURM, **TORCHRUN})
    assert info is not None and info.how == "torchrun"


def test_local_rank_indexes_the_visible_gpus(gpus) -> None:
    gpus(2)
    info = env.rank_info("auto", {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "4,5"})
    assert info is not None and (info.device, info.backend) == ("cuda:1", "nccl")


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("4,5", ["cuda:0", "cuda:1"]),  # indices into the list: the machine's GPUs 4 and 5
        ("GPU-8932f937,GPU-0e48ed5c", ["cuda:0", "cuda:1"]),
        (None, ["cuda:0", "cuda:1"]),
        ("", ["cpu", "cpu"]),
        ("4", ["cuda:0", "1 GPU "]),
        ("7,99", ["cuda:0", "1 GPU "]),  # CUDA ends the list at a GPU that is not there
    ],
)
def test_visible_gpus_are_never_numbered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: list[str]
) -> None:
    """Each rank takes its entry of the list it was given, and the list stays as it is."""
    monkeypatch.setattr(env, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(env, "gpu_count", lambda v: gpu_count(v, root=tmp_path))
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / f"dev/nvidia{number}").touch()
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    for rank, device in enumerate(devices):
        environ = {**TORCHRUN, **given, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        if device.startswith("1 GPU"):
            with pytest.raises(LayoutError, match=rf"{device}\(CUDA_VISIBLE_DEVICES={visible}\)"):
                env.rank_info("auto", environ)
        else:
            info = env.rank_info("auto", environ)
            assert info is not None and info.device == device
    assert "CUDA_VISIBLE_DEVICES" not in _workers(given)


def test_more_ranks_than_gpus_is_refused_unless_gloo_is_asked_for(gpus) -> None:
    gpus(1)
    with pytest.raises(LayoutError, match=r"4 ranks .* 1 GPU .*CUDA_VISIBLE_DEVICES=6"):
        env.rank_info("auto", {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "6"})
    info = env.rank_info("gloo", TORCHRUN)
    assert info is not None and (info.device, info.backend) == ("cpu", "gloo")


def test_slurm_that_shows_each_task_its_own_gpu(gpus) -> None:
    gpus(1)
    info = env.rank_info("auto", {**SLURM, "CUDA_VISIBLE_DEVICES": "3"})
    assert info is not None and info.device == "cuda:0"


def test_nccl_without_gpus_is_refused(gpus) -> None:
    with pytest.raises(LayoutError, match=r"launch\.backend=nccl needs GPUs"):
        env.rank_info("nccl", TORCHRUN)


def _workers(environ: dict[str, str], **changes) -> dict[str, str]:
    settings = {"threads": None, "tune_allocator": True, "on_cpu": True, "workers": 4, "cores": 9}
    return env.worker_environment(**{**settings, **changes}, environ=environ)


def test_workers_share_the_cores_and_keep_buffers() -> None:
    added = _workers({})
    assert added["OMP_NUM_THREADS"] == "2"
    assert added["MALLOC_MMAP_THRESHOLD_"] == "4294967296"
    assert added["MALLOC_TRIM_THRESHOLD_"] == "68719476736"
    assert added["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert _workers({}, workers=16)["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays() -> None:
    mine = {
        "OMP_NUM_THREADS": "7",
        "MALLOC_MMAP_THRESHOLD_": "1",
        "MALLOC_TRIM_THRESHOLD_": "2",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=1",
        "GLOO_SOCKET_IFNAME": "eth3",
        "PYTHONUNBUFFERED": "",
    }
    assert set(_workers(mine)) == {env.LAUNCHER_PID, env.JOB_STARTED}
    assert _workers(mine, threads=3)["OMP_NUM_THREADS"] == "3"


def test_allocator_settings_can_be_left_out_and_are_for_cpus() -> None:
    assert (
        not {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"} & _workers({}, tune_allocator=False).keys()
    )
    assert not {"GLIBC_TUNABLES", "GLOO_SOCKET_IFNAME"} & _workers({}, on_cpu=False).keys()


def test_variables_of_a_process_to_be_started_leave_this_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGADS_TEST_A", "old")
    before = dict(os.environ)
    given = env.with_variables({"MEGADS_TEST_A": "new", "MEGADS_TEST_B": "b"})
    assert given == {**before, "MEGADS_TEST_A": "new", "MEGADS_TEST_B": "b"}
    assert dict(os.environ) == before


def test_a_forked_process_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})
    assert env.started() is None
    env.become_worker(2, 4, "127.0.0.1", 1234, Path("/x/error-2.json"), supervisor=77)
    assert env.started() == env.Started(2, 2, 77, Path("/x/error-2.json"))
    info = env.rank_info("gloo")
    assert info is not None
    assert (info.rank, info.world_size, info.local_world_size, info.node) == (2, 4, 4, 0)
    assert (info.master_addr, info.master_port, info.how) == ("127.0.0.1", 1234, "local")
