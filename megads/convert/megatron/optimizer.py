"""Master weights and Adam's moments in the optimizer's state of a rank of Megatron-LM.

The state knows parameters by number only. They are numbered group by group, and within a group in
the order of the model; a group takes those with or without weight decay. Biases and vectors go
without. That this fits is seen by their shapes, and by master weights being the model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megads.convert.megatron.buffers import read_buffers
from megads.convert.megatron.state import Held, RankState
from megads.convert.source import Kind
from megads.errors import CheckpointError

MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")

_QK_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")

Place = tuple[int, str]
"""A parameter of a rank: its virtual stage, and its name there."""


@dataclass
class OptimizerState:
    """What is known of a rank's parameters beside the model: by kind ("param": master weights).

    `left_out`: why there are no moments, for the user to read.
    """

    held: dict[Kind, dict[Place, Held]] = field(default_factory=dict)
    steps: int | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class _Parameter:
    place: Place
    tensor: Tensor

    def is_decayed(self, args: Mapping[str, Any]) -> bool:
        name = self.place[1]
        if args.get("apply_wd_to_qk_layernorm") and name.endswith(_QK_NORMS):
            return True
        return self.tensor.ndim > 1 and not name.endswith(".bias")

    @property
    def is_at_an_end(self) -> bool:
        """Whether a rate of its own may apply: to embeddings and the head."""
        return self.place[1].startswith(("embedding.", "output_layer."))


def read_optimizer(rank: RankState) -> OptimizerState:
    """The optimizer's state of a rank; empty if it holds none.

    Raises CheckpointError if its parameters cannot be told apart.
    """
    state: Any = rank.content.get("optimizer")
    found = OptimizerState()
    if state is None:
        return found
    if not isinstance(state, dict):
        raise CheckpointError(f"{rank.path}: several optimizers are not supported")
    inner = _inner(state)
    groups = inner.get("param_groups", [])
    found.steps = updates_of(state)
    buffers = rank.path.with_name("distrib_optim.pt")
    if rank.args.get("use_distributed_optimizer"):
        if buffers.is_file():
            found.held = read_buffers(buffers, rank)
        else:
            found.left_out = f"there is no {buffers}, where the distributed optimizer has them"
        return found
    numbered = list(_numbered(rank, groups))
    masters = state.get("fp32_from_fp16_params", state.get("fp32_from_fp16"))
    if masters is not None:
        found.held["param"] = _masters(rank, numbered, masters)
    if inner.get("state"):
        moments = _moments(rank, numbered, inner["state"])
        found.held |= moments
        if not moments:
            found.left_out = f"the optimizer in {rank.path} is not Adam"
    return found


def updates_of(state: Any) -> int | None:
    """How many updates the state of an optimizer says it has made."""
    if not isinstance(state, dict):
        return None
    inner = _inner(state)
    entries = inner.get("state", {})
    common = {"step": entries.get("common_step")}
    for holder in (common, *inner.get("param_groups", []), *entries.values()):
        step = holder.get("step") if isinstance(holder, dict) else None
        if step is not None:
            return int(step)
    return None


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What torch calls the optimizer's state; precision other than fp32 wraps it in another."""
    inner: Mapping[str, Any] = state.get("optimizer", state.get("optimizer_state_dict", state))
    return inner


@dataclass(frozen=True)
class _Numbered:
    """A group's parameters, and the number of each in the state."""

    numbers: tuple[Any, ...]
    parameters: tuple[_Parameter, ...]


def _numbered(rank: RankState, groups: Sequence[Mapping[str, Any]]) -> Iterator[_Numbered]:
    waiting: dict[tuple[bool, bool], deque[_Parameter]] = {}
    own_rate = any(group.get("is_decoupled_lr") for group in groups)
    for chunk, parameters in enumerate(rank.chunks):
        for name, held in parameters.items():
            one = _Parameter((chunk, name), held.tensor)
            key = (one.is_decayed(rank.args), own_rate and one.is_at_an_end)
            waiting.setdefault(key, deque()).append(one)
    for number, group in enumerate(groups):
        queue = waiting.get((_decays(group, number, groups), bool(group.get("is_decoupled_lr"))))
        wanted = tuple(group["params"])
        if queue is None or len(queue) < len(wanted):
            raise CheckpointError(
                f"{rank.path}: group {number} of the optimizer has {len(wanted)} parameters, and "
                f"the model has {len(queue or ())} of its kind left"
            )
        yield _Numbered(wanted, tuple(queue.popleft() for _ in wanted))
    left = [one.place[1] for queue in waiting.values() for one in queue]
    if left:
        raise CheckpointError(f"{rank.path}: the optimizer's groups lack {left[0]}")


def _decays(group: Mapping[str, Any], number: int, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group's parameters decay; if all rates of decay are 0, the first group's do."""
    if "wd_mult" in group:
        return bool(group["wd_mult"])
    if any(other.get("weight_decay") for other in groups):
        return bool(group.get("weight_decay"))
    return number == 0


def _masters(
    rank: RankState, groups: Sequence[_Numbered], masters: Sequence[Sequence[Tensor]]
) -> dict[Place, Held]:
    """Only parameters of 16 bits have a master; the others are their own."""
    found = {}
    for number, (group, tensors) in enumerate(zip(groups, masters, strict=True)):
        halves = [one for one in group.parameters if one.tensor.dtype != torch.float32]
        if len(halves) != len(tensors):
            raise CheckpointError(
                f"{rank.path}: group {number} has {len(tensors)} master weights for {len(halves)} "
                "parameters"
            )
        for position, (one, tensor) in enumerate(zip(halves, tensors, strict=True)):
            label = f"{rank.label}:optimizer.fp32_from_fp16_params.{number}.{position}"
            found[one.place] = _fitting(rank, one, Held(label, tensor))
        found |= {
            one.place: rank.chunks[one.place[0]][one.place[1]]
            for one in group.parameters
            if one.tensor.dtype == torch.float32
        }
    return found


def _moments(
    rank: RankState, groups: Sequence[_Numbered], state: Mapping[Any, Any]
) -> dict[Kind, dict[Place, Held]]:
    """Both moments, if the optimizer is Adam."""
    if not all(moment in entry for entry in state.values() for moment in MOMENTS):
        return {}
    found: dict[Kind, dict[Place, Held]] = {moment: {} for moment in MOMENTS}
    for group in groups:
        for number, one in zip(group.numbers, group.parameters, strict=True):
            for moment in MOMENTS:
                if number not in state:
                    raise CheckpointError(f"{rank.path}: no {moment} of {one.place[1]}")
                label = f"{rank.label}:optimizer.state.{number}.{moment}"
                found[moment][one.place] = _fitting(rank, one, Held(label, state[number][moment]))
    return found


def _fitting(rank: RankState, one: _Parameter, held: Held) -> Held:
    if held.tensor.shape != one.tensor.shape:
        raise CheckpointError(
            f"{rank.path}: {held.label} has shape {tuple(held.tensor.shape)}, and should belong to "
            f"{one.place[1]} of shape {tuple(one.tensor.shape)}"
        )
    return held
