"""Run a pipeline schedule: forward and backward passes of this rank's stage, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megads.parallel.batch import MicroBatch
from megads.parallel.gradsync import GradSync, NoSync
from megads.parallel.mesh import Mesh
from megads.pipeline.p2p import Inbox, Outbox
from megads.pipeline.partition import StagePlan
from megads.pipeline.schedule import (
    Action,
    build_forward_schedule,
    build_schedule,
    send_window,
)

StageModule = Callable[[Tensor | None, MicroBatch], Tensor]
Key = tuple[int, int]
"""(chunk, microbatch)"""


@dataclass(frozen=True)
class Root:
    """The graph of a tensor without the tensor: a scalar above it, and where its gradient is put.

    Giving torch a gradient at the start of a backward pass would do the same, but makes it import
    sympy, which takes every new process more than two seconds of computing.
    """

    edge: GradientEdge
    gradient: list[Tensor]

    @classmethod
    def of(cls, output: Tensor) -> Root:
        gradient: list[Tensor] = []
        return cls(get_gradient_edge(_Scalar.apply(output, gradient)), gradient)

    def backward(self, gradient: Tensor) -> None:
        """Run the graph backward from this gradient of the tensor."""
        self.gradient.append(gradient)
        torch.autograd.backward([self.edge])


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class PipelineExecutor:
    """Walks this stage's actions of a schedule. A single stage is the case without messages.

    `modules`: one per chunk of this stage, called with the input activation (None for the first
    virtual stage) and the microbatch. They return an activation of shape
    `activation_shape(microbatch)` and type `dtype`; the last virtual stage returns the fp32 scalar
    sum of token losses. Stages between the first and the last get the microbatch too; all that is
    asked of it there is what `activation_shape` reads.
    `before_forward(chunk, microbatch)` is called ahead of every forward pass: it seeds dropout.
    `peak_in_flight`: the most (chunk, microbatch) pairs of the last run that held a graph at once.
    """

    def __init__(
        self,
        modules: Sequence[StageModule],
        plan: StagePlan,
        schedule_name: str,
        mesh: Mesh,
        *,
        activation_shape: Callable[[MicroBatch], tuple[int, ...]],
        dtype: torch.dtype,
        before_forward: Callable[[int, MicroBatch], None] | None = None,
    ) -> None:
        if plan.num_stages != mesh.pp.size or len(modules) != plan.chunks:
            raise ValueError(
                f"the plan has {plan.num_stages} stages of {plan.chunks} chunks, the mesh "
                f"{mesh.pp.size} stages and this one {len(modules)} modules"
            )
        self.modules = modules
        self.chunks = plan.chunks_of(mesh.pp.index)
        self.plan = plan
        self.schedule_name = schedule_name
        self.mesh = mesh
        self.activation_shape = activation_shape
        self.dtype = dtype
        self.before_forward = before_forward
        self.peak_in_flight = 0
        self._actions: dict[tuple[str, int], list[Action]] = {}
        # An unknown schedule, or one that cannot run these chunks, is refused before any work.
        self._schedule(schedule_name, 1)

    def run(
        self, microbatches: Sequence[MicroBatch], grads: GradSync, *, grad_scale: float
    ) -> Tensor:
        """Forward and backward of all microbatches of a step.

        The gradient of the sum of token losses times `grad_scale` is accumulated wherever the
        modules accumulate it; `grads` is told before and after each backward pass. Returns the sum
        of token losses over the microbatches, an fp32 scalar without a graph; 0 off the last stage.
        """
        actions = self._schedule(self.schedule_name, len(microbatches))
        walk = _Walk(self, microbatches, grads, grad_scale)
        with torch.enable_grad():
            walk.over(actions)
        self.peak_in_flight = walk.peak_in_flight
        return walk.loss

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Forward only: the sum of token losses over the microbatches, 0 off the last stage.

        Microbatches may differ in size. Switching modules to evaluation mode is the caller's.
        """
        actions = self._schedule("forward", len(microbatches))
        walk = _Walk(self, microbatches, NoSync(), 0.0)
        with torch.no_grad():
            walk.over(actions)
        return walk.loss

    def _schedule(self, name: str, num_microbatches: int) -> list[Action]:
        """This stage's actions, built once for each number of microbatches."""
        key = name, num_microbatches
        if key not in self._actions:
            size = self.plan.num_stages, self.plan.chunks, num_microbatches
            schedule = (
                build_forward_schedule(*size) if name == "forward" else build_schedule(name, *size)
            )
            self._actions[key] = schedule[self.mesh.pp.index]
        return self._actions[key]


class _Walk:
    """State of one pass over the actions; nothing of it outlives the step."""

    def __init__(
        self,
        executor: PipelineExecutor,
        microbatches: Sequence[MicroBatch],
        grads: GradSync,
        grad_scale: float,
    ) -> None:
        mesh, links = executor.mesh, executor.mesh.links
        window = send_window(mesh.pp.size, len(microbatches))
        self.executor = executor
        self.microbatches = microbatches
        self.grads = grads
        self.grad_scale = grad_scale
        self.activations_in = Inbox(links.activation_in, mesh.device)
        self.activations_out = Outbox(links.activation_out, window)
        self.gradients_in = Inbox(links.gradient_in, mesh.device)
        self.gradients_out = Outbox(links.gradient_out, window)
        self.made: dict[Action, Tensor] = {}  # results, under the action that will send them
        self.in_flight: dict[Key, tuple[Root, Tensor | None]] = {}
        self.peak_in_flight = 0
        self.last_backward: dict[int, int] = {}
        self.loss = torch.zeros((), dtype=torch.float32, device=mesh.device)

    def over(self, actions: Sequence[Action]) -> None:
        """Do the actions in order."""
        self.last_backward = {a.chunk: a.microbatch for a in actions if a.op == "B"}
        for action in actions:
            op, key = action.op, (action.chunk, action.microbatch)
            if op == "F":
                self.forward(key)
            elif op == "B":
                self.backward(key)
            elif op == "recv_act":
                self.activations_in.post(key, self.shape(key), self.executor.dtype)
            elif op == "recv_grad":
                self.gradients_in.post(key, self.shape(key), self.executor.dtype)
            elif op == "send_act":
                self.activations_out.send(self.made.pop(action))
            else:
                self.gradients_out.send(self.made.pop(action))
        self.activations_out.flush()
        self.gradients_out.flush()

    def forward(self, key: Key) -> None:
        chunk, microbatch = key
        executor, plan = self.executor, self.executor.chunks[chunk]
        batch, training = self.microbatches[microbatch], torch.is_grad_enabled()
        hidden = None if plan.has_embedding else self.activations_in.take(key)
        if hidden is not None and training:
            hidden.requires_grad_()
        if executor.before_forward is not None:
            executor.before_forward(chunk, batch)
        with executor.mesh.phases("forward", *key):
            output = executor.modules[chunk](hidden, batch)
        self.check(output, key)
        if training:
            # The root keeps the graph but not the output, whose memory goes once it is sent.
            self.in_flight[key] = Root.of(output), hidden
            self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        if plan.has_head:
            self.loss += output.detach()
        elif executor.mesh.pp.size == 1:
            self.activations_in.put((chunk + 1, microbatch), output.detach())
        else:
            self.made[Action("send_act", chunk, microbatch)] = output.detach()

    def backward(self, key: Key) -> None:
        chunk, microbatch = key
        plan = self.executor.chunks[chunk]
        root, hidden = self.in_flight.pop(key)
        if plan.has_head:
            gradient = torch.full_like(self.loss, self.grad_scale)
        else:
            gradient = self.gradients_in.take(key)
        is_last = self.last_backward[chunk] == microbatch
        with self.executor.mesh.phases("backward", *key):
            self.grads.before_backward(chunk, is_last=is_last)
            root.backward(gradient)
            self.grads.after_backward(chunk)
        if hidden is None:
            return
        if hidden.grad is None:
            raise ValueError(f"the output of chunk {chunk} does not depend on its input")
        if self.executor.mesh.pp.size == 1:
            self.gradients_in.put((chunk - 1, microbatch), hidden.grad)
        else:
            self.made[Action("send_grad", chunk, microbatch)] = hidden.grad

    def shape(self, key: Key) -> tuple[int, ...]:
        return tuple(self.executor.activation_shape(self.microbatches[key[1]]))

    def check(self, output: Tensor, key: Key) -> None:
        """A neighbour that expects another size would crash or read garbage far from the cause."""
        has_head = self.executor.chunks[key[0]].has_head
        shape, dtype = ((), torch.float32) if has_head else (self.shape(key), self.executor.dtype)
        if output.shape != shape or output.dtype != dtype:
            raise ValueError(
                f"chunk {key[0]} of stage {self.executor.mesh.pp.index} returned "
                f"{output.dtype} {tuple(output.shape)}; the pipeline expects {dtype} {shape}"
            )
