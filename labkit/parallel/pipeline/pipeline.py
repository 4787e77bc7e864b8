"""Pipeline parallelism: each rank holds some layers; micro-batches pass from rank to rank.

    the rows of a batch, split into m = 4 micro-batches, on p = 3 ranks; schedule "1f1b"
        rank 0   layers 0 1    F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3     x enters here
        rank 1   layers 2 3       F0 F1 .. B0 F2 B1 F3 B2 .. B3
        rank 2   layers 4 5          F0 B0 F1 B1 F2 B2 F3 B3           y and the loss

    each rank holds   1/p of parameters and gradients; activations of the micro-batches in flight,
                      whose number the schedule limits (to p - rank with 1F1B)
    traffic           b s h elements (rows, positions, width) per boundary, direction, micro-batch
    idle              the bubble: (p-1)/(m+p-1) of the step with GPipe and 1F1B

`step` runs a schedule (labkit.schedules), a list of actions per rank. With v chunks, chunk c of
rank r is virtual stage c p + r. Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al.,
arXiv 2104.04473, section 2.2; action lists as in torch.distributed.pipelining.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn

from labkit import events
from labkit.comm import Comm
from labkit.parallel.common.sharder import LossScaler
from labkit.parallel.pipeline import grad_sync, validation
from labkit.parallel.pipeline.p2p import P2PChannel
from labkit.parallel.pipeline.scatter_gather import scatter_gather_over
from labkit.parallel.pipeline.stages import StagedModel
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.schedules.actions import Action, Schedule, received, sent, virtual_stage

Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pipeline(StagedModel):
    """This rank's part of a pipeline over `stages`.

    Args:
        stages: all p v virtual stages in order, as `split` returns, equal on every rank. Each stage
            maps a tensor [rows, ...] to a tensor.
        comm: the ranks, such as `mesh.pp`; default: all ranks.
        schedule: a name in `labkit.schedules` ("gpipe", "interleaved", "zb-h1", ...), or a custom
            list of actions per rank.
        microbatches: m; default: 8, or the count in a custom schedule.
        loss_fn: loss_fn(output, y) -> mean over the rows, a scalar; called on the last stage.
        chunks: v; must match the number of stages.
        recompute: keep only the stages' inputs, and repeat their forward in backward.
        optimizer: for schedules with updates ("pipedream"): an optimizer, or a function of the
            parameters, such as `lambda p: torch.optim.SGD(p, lr=0.1)`.
        scatter_gather: tensor-parallel ranks, such as `mesh.tp`, each of which sends
            1/t of x (scatter_gather.py). Not for a sharded sequence.
        wrap: a function that wraps each trainable local stage, such as
            `lambda stage: DDP(stage, mesh.dp)`; alternatively, pass wrapped stages.

    Create a ZeroOptimizer after the pipeline (grad_sync.py). `clip_grad_norm` uses the norm over
    all stages; `save_checkpoint` saves one model. Raises ValueError, on every rank, if
    stages or micro-batches do not fit the ranks, or differ between ranks; ScheduleError for invalid
    schedules."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        comm: Comm | None = None,
        schedule: str | Schedule = "1f1b",
        microbatches: int | None = None,
        loss_fn: Loss | None = None,
        *,
        chunks: int | None = None,
        recompute: bool = False,
        optimizer: Optimizer | None = None,
        scatter_gather: Comm | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ):
        super().__init__()
        self.comm = comm = Comm.of(comm)
        self.chunks = validation.check_stages(stages, comm, chunks)
        agreed = validation.agreed_schedule(schedule, comm, microbatches, self.chunks)
        self.schedule, self.microbatches = agreed
        owners = grad_sync.owners_of(stages, comm.size)
        validation.check_loss(loss_fn, comm, len(stages))
        own = [virtual_stage(comm.rank, chunk, comm.size) for chunk in range(self.chunks)]
        stages = grad_sync.wrapped(stages, own, comm.size, wrap)
        validation.check_phases(stages, self.schedule, comm)
        grad_sync.check_ties(stages, owners, comm)
        self._tied = grad_sync.Tied(owners, comm)
        self._set_stages(stages, own, owners)
        modules, last = [stages[index] for index in own], len(stages) - 1
        self._optimizer = validation.optimizer_of(optimizer, modules, self.schedule, owners)
        actions, place = self.schedule[comm.rank], (comm.rank, comm.size, self.chunks)
        self._program = [  # (action, message received, message sent)
            (action, received(action, *place), sent(action, *place)) for action in actions
        ]
        loss_of = partial(Pipeline._loss_of, cast(Pipeline, proxy(self)))  # no reference cycle
        self._stages = [
            VirtualStage(
                stages[index], index, comm.rank, [a for a in actions if a.chunk == chunk],
                recompute, self._optimizer, loss_of if index == last else None,
            )
            for chunk, index in enumerate(own)
        ]  # fmt: skip
        self._last_backward = grad_sync.last_backward(actions, self._stages)
        self._has_first, self._has_last = own[0] == 0, own[-1] == last
        self._xs: dict[Action, Tensor] = {}  # on the first stage: forward -> its micro-batch
        self._loss_fn = loss_fn
        parts = scatter_gather_over(scatter_gather, comm, modules)
        self._p2p = P2PChannel(comm, self.schedule, parts)
        self._agreed: Any = None  # the settings of the last step, equal on all ranks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a Pipeline has no forward; call step(x, y), inside no_grad() to evaluate")

    def step(self, x: Tensor, y: Tensor, scaler: LossScaler | None = None) -> Tensor | None:
        """Run forward and backward of one batch, and leave the gradients in `.grad`.

        Args:
            x, y: the same batch on all ranks, [rows, ...]; the first stage uses x, the last uses y.
                Micro-batch losses are weighted by rows, so gradients are those of the batch mean.
            scaler: the same on all ranks; afterward, call `scaler.step(optimizer)` and
                `scaler.update()`.

        Returns the mean loss, detached, on the last stage's rank; None elsewhere. To evaluate, call
        this inside `torch.no_grad()`. Modes (train or eval, gradients, autocast) must agree between
        ranks, but may change between steps. Raises ValueError if there are fewer rows than
        micro-batches, x and y differ in rows, or a stage overwrites an output while it is sent;
        RuntimeError if the loss lacks a gradient that parameters need; StageError if a stage cannot
        take its input; CommError if a message does not arrive."""
        self._begin(x, y, scaler)
        for action, incoming, outgoing in self._program:
            message = self._p2p.receive(incoming) if incoming else self._xs.get(action)
            with self._without_sync(action):
                result = self._stages[action.chunk].run(action, message)
            if outgoing:
                self._p2p.send(outgoing, result)
            del message, result  # free memory
        self._p2p.end()
        self._tied.sum_gradients()
        self._xs, self._ys = {}, ()
        return self._loss if self._has_last else None

    def _without_sync(self, action: Action) -> ExitStack:
        """A ZeroOptimizer that sends once per step does so in the last backward of all chunks."""
        stack = ExitStack()
        for optimizer in self._send_once if action != self._last_backward else ():
            stack.enter_context(optimizer.no_sync())
        return stack

    def _begin(self, x: Tensor, y: Tensor, scaler: LossScaler | None) -> None:
        validation.check_batch(x, y, self.microbatches, self.comm, self._has_last)
        for stage in self._stages:
            stage.unchanged.check()
        rows = events.chunk_sizes(len(x), self.microbatches)
        self._shares = [n / len(x) for n in rows]
        xs = x.detach().split(rows) if self._has_first else ()
        self._xs = {Action("forward", k): part for k, part in enumerate(xs)}
        self._ys = y.split(rows) if self._has_last else ()
        self._loss = x.new_zeros((), dtype=torch.float64)
        agreed = validation.check_agreement(x, self, self._agreed)
        self._p2p.begin(rows, x.device, changed=agreed != self._agreed)
        self._agreed = agreed
        self._scaler = scaler if torch.is_grad_enabled() else None
        if self._scaler is not None:
            validation.check_scaler(self._scaler, self)
            if not self._has_last:
                self._scaler.scale(torch.zeros(()))  # instead of a loss
        self._tied.begin()
        self._send_once = grad_sync.optimizers_that_send_once(self.module, self.schedule)

    def _loss_of(self, output: Tensor, k: int) -> Tensor:
        """Micro-batch k's share of the batch mean, or its full loss with PipeDream's updates."""
        assert self._loss_fn is not None
        last, loss = self._stages[-1], self._loss_fn(output, self._ys[k])
        needed = self._p2p.has_gradient(last.index - 1)  # by earlier stages
        needed |= any(p.requires_grad for p in last.module.parameters())
        at = f"stage {last.index} (rank {self.comm.rank}), micro-batch {k}"
        validation.check_loss_of(loss, needed, at)
        loss = loss.reshape(())
        self._loss += loss.detach() * self._shares[k]
        if self._optimizer:
            return loss
        share = loss * self._shares[k]
        return share if self._scaler is None else self._scaler.scale(share)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._agreed = None  # for example, pipeline.bfloat16() changes the dtypes sent
        return super()._apply(fn, recurse)
