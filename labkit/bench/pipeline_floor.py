"""The least that a step of a pipeline can take: what its stages compute, and the bubble.

Each stage runs its actions on messages that are already there, and each action is timed, its median
over the turns. A replay of the schedule with these times, and messages that take none, gives the
step's time. It is no less than all computing together over the cores: four stages on two cores do
not compute at once.
"""

import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.models import GPT
from labkit.models.gpt import PRESETS
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.parallel.splitting import split
from labkit.replaying.pipeline import pipeline_step_s, pipeline_trace
from labkit.schedules import Action, received, schedule, virtual_stage

ROWS, LENGTH, VOCAB, DEPTH = 16, 64, 1024, 8  # the batch, of all micro-batches; blocks of the GPT
CHUNKS = {"interleaved": 2}  # of the others: 1


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over the tokens: logits [rows, length, vocab], y [rows, length]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """x and y, [ROWS, LENGTH] each, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stages_of(model: str, name: str, ranks: int) -> list[nn.Module]:
    """The same GPT each time, in as many stages as the schedule needs. (Not tied: torch's pipelines
    have no way to sum the gradients of one parameter on two ranks.)"""
    torch.manual_seed(0)
    whole = GPT.preset(model, vocab=VOCAB, context=LENGTH, depth=DEPTH, tied=False)
    return split(whole, ranks * CHUNKS.get(name, 1))


class Floor:
    """A rank's list of actions, without communication: `measure` a few times, then `step_s`."""

    def __init__(self, model: str, name: str, microbatches: int, comm: Comm):
        self.comm, chunks = comm, CHUNKS.get(name, 1)
        self.schedule = schedule(name, comm.size, microbatches, chunks)
        self.actions, stages = self.schedule[comm.rank], stages_of(model, name, comm.size)
        x, y = batch()
        ys = y.chunk(microbatches)

        def loss_of_microbatch(output: Tensor, k: int) -> Tensor:
            return loss_of(output, ys[k]) / microbatches

        self.stages = []
        for chunk in range(chunks):
            index = virtual_stage(comm.rank, chunk, comm.size)
            own = [action for action in self.actions if action.chunk == chunk]
            loss = loss_of_microbatch if index == len(stages) - 1 else None
            stage = VirtualStage(stages[index], index, comm.rank, own, False, None, loss)
            self.stages.append(stage)
        self.xs, width = x.chunk(microbatches), PRESETS[model]["width"]
        self.activations = [torch.randn(len(x), LENGTH, width) for x in self.xs]
        self.position = comm.rank, comm.size, chunks
        self.turns: list[list[list[float]]] = []  # seconds of each action of each stage

    def time_actions(self) -> list[float]:
        """Seconds of each action of this rank."""
        for stage in self.stages:
            stage.module.zero_grad()
        seconds = []
        for action in self.actions:
            message = self._message(action)
            began_s = time.perf_counter()
            self.stages[action.chunk].do(action, message)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    def _message(self, action: Action) -> Tensor | None:
        """A made-up message of the right shape."""
        if received(action, *self.position) is None:
            return self.xs[action.microbatch] if action.phase == "forward" else None
        message = self.activations[action.microbatch].detach().clone()
        return message.requires_grad_(action.phase == "forward")

    def measure(self) -> None:
        """As many ranks at once as there are cores; the others wait for their turn."""
        cores = os.cpu_count() or 1
        of_ranks: list[list[float]] = [[] for _ in range(self.comm.size)]
        for first in range(0, self.comm.size, cores):
            self.comm.barrier()
            mine = self.time_actions() if first <= self.comm.rank < first + cores else []
            for rank, seconds in enumerate(self.comm.all_gather_object(mine)):
                of_ranks[rank] = seconds or of_ranks[rank]
        self.turns.append(of_ranks)

    def step_s(self) -> float:
        """The floor, from the medians of the turns."""
        stages = zip(*self.turns)
        medians = [[median(action) for action in zip(*stage, strict=True)] for stage in stages]
        return floor_s(self.schedule, medians, os.cpu_count() or 1)


def floor_s(actions: Sequence[Sequence[Action]], taken: list[list[float]], cores: int) -> float:
    """Seconds of a step whose actions take these, by stage and place in its list."""
    seconds_of = {
        (stage, action): seconds
        for stage, listed in enumerate(actions)
        for action, seconds in zip(listed, taken[stage], strict=True)
    }
    trace = pipeline_trace([list(listed) for listed in actions], lambda *key: seconds_of[key])
    busy_s = sum(map(sum, taken))
    return max(pipeline_step_s(trace), busy_s / min(cores, len(taken)))
