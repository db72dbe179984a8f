"""Which backend computes what, and what happens when it cannot."""

from __future__ import annotations

import subprocess
import sys
import typing
from dataclasses import replace

import pytest
import torch

from megads.config.schema import KernelBackend, KernelsConfig
from megads.errors import KernelUnavailable
from megads.kernels import api, compiled, reference, torch_native
from megads.kernels.api import AUTO_ORDER, OPERATIONS, backends, select_kernels

FP32 = torch.float32


def test_auto_is_torch() -> None:
    kernels, report = select_kernels(KernelsConfig(), "cpu", FP32)
    assert report == dict.fromkeys(OPERATIONS, "torch")
    assert kernels.norm is torch_native.norm and kernels.adamw is torch_native.adamw


def test_one_backend_for_all_and_another_for_one_op() -> None:
    config = KernelsConfig(name="reference", attention="torch")
    kernels, report = select_kernels(config, "cpu", FP32)
    assert kernels.attention is torch_native.attention and kernels.rotary is reference.rotary
    assert report == dict.fromkeys(OPERATIONS, "reference") | {"attention": "torch"}


def test_every_op_has_a_setting() -> None:
    assert set(KernelsConfig.model_fields) == {"name", *OPERATIONS}


def test_the_names_of_backends_and_their_order_are_those_of_the_setting() -> None:
    names = typing.get_args(KernelBackend)
    assert sorted(names) == sorted(["auto", *AUTO_ORDER]) == sorted(["auto", *backends()])
    assert backends()["compiled"].provides == tuple(compiled.operations())


def test_auto_passes_over_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known = backends()
    known["torch"] = replace(known["torch"], why_unavailable=lambda device, dtype: "no")
    monkeypatch.setattr(api, "backends", lambda: known)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    _, report = select_kernels(KernelsConfig(), "cpu", FP32)
    assert (report["norm"], report["attention"]) == ("compiled", "reference")
    with pytest.raises(KernelUnavailable, match=r"kernels.norm=torch cannot run here: no"):
        select_kernels(KernelsConfig(norm="torch"), "cpu", FP32)


def test_an_op_that_a_backend_lacks() -> None:
    with pytest.raises(KernelUnavailable, match=r"attention=compiled.*auto, torch, reference$"):
        select_kernels(KernelsConfig(attention="compiled"), "cpu", FP32)


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(KernelUnavailable, match=r"compiled cannot run here: .*compiler"):
        select_kernels(KernelsConfig(norm="compiled"), "cpu", FP32)


def test_a_gpu_is_asked_about_in_a_process_that_has_done_nothing_else() -> None:
    """Of torch's modules not all are there after `import torch`."""
    code = """
import torch
from megads.kernels.compiled import why_unavailable
print(why_unavailable(torch.device("cuda"), torch.float32))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() in ("None", "torch.compile needs triton for this device")


def test_compiled_leaves_the_rest_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    _, report = select_kernels(KernelsConfig(name="compiled"), "cpu", FP32)
    assert report["attention"] == "torch" and report["norm"] == "compiled"
