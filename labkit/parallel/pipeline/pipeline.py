"""Pipeline parallelism: each rank has some layers, and micro-batches go from rank to rank.

    a batch of rows, cut into m micro-batches; 3 stages, 4 micro-batches, schedule "1f1b"

        rank 0   layers 0 1    F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3     x goes in here
        rank 1   layers 2 3       F0 F1 .. B0 F2 B1 F3 B2 .. B3
        rank 2   layers 4 5          F0 B0 F1 B1 F2 B2 F3 B3           y, and the loss

    each rank holds   its layers' parameters and gradients, 1/p of the model; the activations of
                      the micro-batches in flight, which the schedule bounds: p - rank with 1F1B
    travels           over each boundary, for each micro-batch: its activations forward, their
                      gradient back, rows x rest elements each (b s h of a GPT; over t
                      tensor-parallel ranks b s h / t from each, with scatter_gather)
    idle              the bubble: (p-1)/(m+p-1) of the step with GPipe and 1F1B

Who computes what, and when, is data: a schedule (labkit.schedules), a list of actions for each
rank. There is one runner for all of them, the loop in `step`. It waits for the one message that an
action needs, computes, lets the result leave and goes on.

With v chunks a rank has v pieces of the model, and the model goes round v times: chunk c of rank r
is virtual stage c p + r of p v.

Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, section 2.2;
the runner over lists of actions: torch.distributed.pipelining.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn

from labkit import events
from labkit.comm import Comm
from labkit.parallel.common.agreement import WeakMark
from labkit.parallel.common.sharder import LossScaler
from labkit.parallel.common.whole import full_state_dict
from labkit.parallel.pipeline.p2p import P2PChannel
from labkit.parallel.pipeline.scatter_gather import scatter_gather_over
from labkit.parallel.pipeline.stages import Layers, further_names, layers_in, prefix_of
from labkit.parallel.pipeline.synchronising import (
    last_backward,
    optimizers_that_send_once,
    wrapped,
)
from labkit.parallel.pipeline.tied import Tied, check_ties, owners_of
from labkit.parallel.pipeline.validation import (
    agreed_schedule,
    check_alike,
    check_batch,
    check_has_gradient,
    check_loss,
    check_phases,
    check_scaler,
    check_stages,
    optimizer_of,
)
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.schedules.actions import Action, Schedule, received, sent, virtual_stage

Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Pipeline(nn.Module):
    """This rank's part of a pipeline of `stages`.

    Args:
        stages: the modules of all virtual stages in order, p v of them for p ranks, as `split`
            makes them, or your own. Every rank gives all, built alike; it keeps its own, and
            forgets the others. Each maps one tensor [rows, ...] to one tensor [rows, ...].
        comm: the ranks, as `mesh.pp`; all by default.
        schedule: a name ("gpipe", "1f1b", "interleaved", "zb-h1", ... of `labkit.schedules`), or
            your own: a list of actions for each rank, which is held to the rules of a schedule.
        microbatches: m; 8 by default, or as many as your own schedule has.
        loss_fn: loss_fn(output, y) -> the mean over the rows, a scalar. Only the rank of the last
            stage calls it.
        chunks: v; it follows from the number of stages, and is checked against it if given.
        recompute: keep only the inputs of each stage, and run its forward again for backward.
        optimizer: of schedules that update weights on their way ("pipedream"): an optimizer, or
            what makes one of a list of parameters, as `lambda p: torch.optim.SGD(p, lr=0.1)`.
        scatter_gather: the tensor-parallel ranks of this stage, as `mesh.tp`, each of which sends
            1/t of what all have (scatter_gather.py). Not where the sequence is cut, too.
        wrap: what to put around each of this rank's stages that has something to train, as
            `lambda stage: DDP(stage, mesh.dp)`; or give stages that are wrapped already.

    Data parallelism: see synchronising.py. A parameter that is on several ranks (a tied
    embedding) has the sum of its gradients there, also as shares of a ZeroOptimizer, if that is
    made after the pipeline; it cannot be in ZeRO3. `clip_grad_norm` of the pipeline, or of an
    optimizer of its parameters, is by the norm of all stages. `save_checkpoint` writes what all
    stages have, as one model.

    Raises ValueError, on every rank, where stages, ranks and micro-batches do not fit, or the ranks
    gave different ones; ScheduleError, which is a ValueError, naming the first rule that a schedule
    breaks.
    """

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
        self.chunks = check_stages(stages, comm, chunks)
        self.schedule, self.microbatches = agreed_schedule(
            schedule, comm, microbatches, self.chunks
        )
        owners = owners_of(stages, comm.size)
        check_loss(loss_fn, comm, len(stages))
        own = [virtual_stage(comm.rank, chunk, comm.size) for chunk in range(self.chunks)]
        stages = wrapped(stages, own, comm.size, wrap)
        check_phases(stages, self.schedule, comm)
        check_ties(stages, owners, comm)
        self._tied = Tied(owners, comm)
        self._owners: dict[Any, tuple[int, ...]] = {**owners}
        self.further_names = further_names(stages)

        self.module = Layers.together(stages, own)
        for p in self.module.parameters():
            p._labkit_pipeline = WeakMark(self)  # type: ignore[attr-defined]
        place = comm.rank, comm.size, self.chunks
        self._program = [  # what it does, waits for before and sends after
            (action, received(action, *place), sent(action, *place))
            for action in self.schedule[comm.rank]
        ]
        self._optimizer = optimizer_of(
            optimizer, [stages[index] for index in own], self.schedule, owners
        )
        me = cast(Pipeline, proxy(self))  # weakly: the stages do not keep it
        loss_of = partial(Pipeline._loss_of, me)
        self._stages = [
            VirtualStage(
                stages[index], index, comm.rank,
                [one for one in self.schedule[comm.rank] if one.chunk == chunk],
                recompute, self._optimizer,
                loss_of if index == len(stages) - 1 else None,
            )
            for chunk, index in enumerate(own)
        ]  # fmt: skip
        self._last_backward = last_backward(self.schedule[comm.rank], self._stages)
        self._send_once: list[Any] = []  # optimizers that hold gradients back until then
        self._has_first, self._has_last = own[0] == 0, own[-1] == len(stages) - 1
        self._scaler: LossScaler | None = None
        self._loss_fn, self._last_index = loss_fn, len(stages) - 1
        parts = scatter_gather_over(scatter_gather, comm, [stages[index] for index in own])
        self._p2p = P2PChannel(comm, self.schedule, parts)
        self._xs: tuple[Tensor, ...] = ()  # micro-batches of the step, on the first stage ...
        self._ys: tuple[Tensor, ...] = ()  # ... and on the last
        self._looked: Any = None  # the batch of the last step, what its rows look like

    copy_advice = "copy pipeline.module, save pipeline.full_state_dict() or a labkit checkpoint"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("call pipeline.step(x, y), inside torch.no_grad() to evaluate")

    # --- the runner ---------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, scaler: LossScaler | None = None) -> Tensor | None:
        """Forward and backward of one batch; afterwards the gradients are in `.grad`.

        x, y: the same batch on all ranks, [rows, ...]; the first stage looks at x, the last at y.
        It is cut into `microbatches` that differ by at most one row, and the loss of each counts
        by its rows: gradients are those of the whole batch's mean.
        scaler: of the loss, on the last stage; give it on all ranks, which decide together. Then
        `scaler.step(optimizer)` and `scaler.update()` as ever.

        Returns that mean, detached, on the rank of the last stage; None on the others. Inside
        `torch.no_grad()` only forwards run: that is how to evaluate. Modes (train or eval,
        gradients, autocast) are the same on all ranks; they may change from step to step.

        Raises ValueError for a batch of fewer rows than micro-batches, where x and y differ in
        rows, or where a stage overwrites an output that is under way; RuntimeError where the loss
        has no gradient and parameters want one; StageError where a stage cannot take what the one
        before hands on; CommError, naming stage, micro-batch and rank, where a message does not
        come.
        """
        self._begin(x, y, scaler)
        for action, needed, leaving in self._program:
            came = self._p2p.receive(needed) if needed else self._of_batch(action)
            with self._without_sync(action):
                result = self._stages[action.chunk].do(action, came)
            if leaving:
                self._p2p.send(leaving, result)
            del came, result  # their memory goes as soon as nobody needs it
        self._p2p.end()
        self._tied.sum_gradients()
        self._xs = self._ys = ()
        return self._loss if self._has_last else None

    @contextmanager
    def _without_sync(self, action: Action) -> Iterator[None]:
        """A ZeroOptimizer has the parameters of all chunks, and sends in the last backward of
        them. (What is around one stage sends in that stage's last.)"""
        with ExitStack() as stack:
            if action != self._last_backward:
                for optimizer in self._send_once:
                    stack.enter_context(optimizer.no_sync())
            yield

    def _of_batch(self, action: Action) -> Tensor | None:
        """Rows of it, for a forward of the first stage. What else needs no message begins at the
        loss, or has all that it needs."""
        return self._xs[action.microbatch] if action.phase == "forward" else None

    # --- around it ----------------------------------------------------------------------------

    def _begin(self, x: Tensor, y: Tensor, scaler: LossScaler | None) -> None:
        check_batch(x, y, self.microbatches, self.comm, self._has_last)
        for stage in self._stages:
            stage.unchanged.check()
        rows = events.chunk_sizes(len(x), self.microbatches)
        self._shares = [n / len(x) for n in rows]
        self._xs = x.detach().split(rows) if self._has_first else ()
        self._ys = y.split(rows) if self._has_last else ()
        self._loss = x.new_zeros((), dtype=torch.float64)
        looks = check_alike(x, self, self._looked)
        self._p2p.begin(rows, x.device, afresh=looks != self._looked)
        self._looked = looks
        self._scaler = scaler if torch.is_grad_enabled() else None
        if self._scaler is not None:
            check_scaler(self._scaler, self)
            if not self._has_last:
                self._scaler.scale(torch.zeros(()))  # in place of a loss
        self._tied.begin()
        self._send_once = optimizers_that_send_once(self.module, self.schedule)

    def _loss_of(self, output: Tensor, k: int) -> Tensor:
        """The part of the batch's mean that micro-batch k has. (PipeDream updates by each alone,
        as if it were a batch: there it counts whole.)"""
        assert self._loss_fn is not None
        loss = self._loss_fn(output, self._ys[k])
        at = f"stage {self._last_index} (rank {self.comm.rank}), micro-batch {k}"
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"{at}: loss_fn gave {found}; it returns a scalar, the mean over the rows"
            )
        check_has_gradient(loss, self._wants_gradient(), at)
        loss = loss.reshape(())
        self._loss += loss.detach() * self._shares[k]
        if self._optimizer:
            return loss
        mine = loss * self._shares[k]
        return mine if self._scaler is None else self._scaler.scale(mine)

    def _wants_gradient(self) -> bool:
        """Whether the last stage does, for its parameters or for the stages before it."""
        parameters = self._stages[-1].module.parameters()
        before = self._p2p.has_gradient(self._last_index - 1)
        return before or any(p.requires_grad for p in parameters)

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks that have it."""
        return self._owners.get(parameter, (self.comm.rank,))

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank is the first, or only one that has it."""
        return self.owners(parameter)[0] == self.comm.rank

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a Pipeline cannot be copied or pickled; {self.copy_advice}")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._looked = None  # as pipeline.bfloat16(): on all ranks something else travels now
        return super()._apply(fn, recurse)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of a schedule that updates weights on its way, as `save_checkpoint` wants it."""
        return self._optimizer

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        """The stages of this rank, as they were given (see common/sharder.py)."""
        return [(prefix_of(one.index, one.module), one.module) for one in self._stages]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of the whole model, on every rank, on the CPU; all ranks call it together, of
        a mesh all. What is cut over further ranks (tensor parallelism, ZeRO3) is whole."""
        mine: dict[str, Tensor] = {}
        for stage in self._stages:
            names = Layers(layers_in(stage.index, stage.module)).state_dict()
            whole = full_state_dict(stage.module).values()  # in the same order
            mine |= {name: x.detach().cpu() for name, x in zip(names, whole, strict=True)}
        every = self.comm.all_gather_object(mine)
        return {name: x for state in every for name, x in state.items()}
