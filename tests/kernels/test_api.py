"""Which backend computes what, and what happens when it cannot."""

from __future__ import annotations

import pytest
import torch

from megads.config.schema import KernelsConfig
from megads.errors import KernelUnavailable
from megads.kernels import compiled, reference, torch_native
from megads.kernels.api import OPERATIONS, select_kernels

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


@pytest.mark.parametrize("field", ["name", "rotary"])
def test_an_unknown_backend_names_the_choices(field: str) -> None:
    with pytest.raises(KernelUnavailable, match=r"tritn.*auto, reference, torch, compiled"):
        select_kernels(KernelsConfig(**{field: "tritn"}), "cpu", FP32)


def test_an_op_that_a_backend_lacks() -> None:
    with pytest.raises(KernelUnavailable, match=r"kernels.attention=compiled.*reference, torch$"):
        select_kernels(KernelsConfig(attention="compiled"), "cpu", FP32)


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(KernelUnavailable, match=r"compiled cannot run here: .*compiler"):
        select_kernels(KernelsConfig(norm="compiled"), "cpu", FP32)


def test_compiled_leaves_the_rest_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    _, report = select_kernels(KernelsConfig(name="compiled"), "cpu", FP32)
    assert report["attention"] == "torch" and report["norm"] == "compiled"
