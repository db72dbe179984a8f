"""Node lists and ports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megads.launch.slurm import FIRST_PORT, PORTS, expand_nodelist, first_host, master_port


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("login,gpu-a[1,3-4],big", ["login", "gpu-a1", "gpu-a3", "gpu-a4", "big"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[5].cluster.example", ["n5.cluster.example"]),
        ("a,b", ["a", "b"]),
    ],
)
def test_expand_nodelist(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts
    assert first_host(nodelist) == hosts[0]


@pytest.mark.parametrize("nodelist", ["n[1-2", "n1]", "n[2-1]", "n[x]", ""])
def test_malformed_lists_are_refused(nodelist: str) -> None:
    with pytest.raises(ValueError):
        first_host(nodelist)


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 9999), min_size=1, max_size=8, unique=True),
)
def test_compressed_numbers_come_back(width: int, numbers: list[int]) -> None:
    names = [f"node{n:0{width}d}" for n in numbers]
    listed = "node[" + ",".join(f"{n:0{width}d}" for n in numbers) + "]"
    assert expand_nodelist(listed) == names


@given(st.integers(1, 2**31), st.integers(0, 30))
def test_ports_are_unprivileged_and_differ_between_neighbouring_jobs(job: int, starts: int) -> None:
    port = master_port(job, starts)
    assert FIRST_PORT <= port < FIRST_PORT + PORTS <= 2**16
    assert port != master_port(job + 1, starts)
    assert port != master_port(job, starts + 1)
