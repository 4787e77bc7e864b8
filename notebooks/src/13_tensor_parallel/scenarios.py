"""Runs lab 13's answers on ranks, and computes the results of a single process."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm import listen
from labkit.course.exercise import Student
from labkit.course.samples import detached, drawn

TOKENS, WIDTH, HIDDEN = 5, 6, 12


# ---- Column


class MatmulRecorder(TorchDispatchMode):
    """Records how many collectives were started and waited for before each matmul."""

    def __init__(self, events: list[Any]):
        super().__init__()
        self.events, self.counts = events, list[tuple[int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
            waited = sum(event.wait_ended_s > 0 or event.blocking for event in self.events)
            self.counts.append((len(self.events), waited))
        return func(*args, **(kwargs or {}))


class ColumnRun(NamedTuple):
    """A rank's results, collectives and matmuls with the student's function."""

    y: Any
    dx: Any
    dweight: Any
    forward_ops: list[str]
    backward_ops: list[str]
    matmuls: list[tuple[int, int]]


def column_inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, w], the whole weight [out, w], the gradient of the whole output [n, out]."""
    out = 4 * size
    return (
        drawn(TOKENS, WIDTH, seed=1),
        drawn(out, WIDTH, seed=2),
        drawn(TOKENS, out, seed=3),
    )


def run_column(comm: Any, student: Student) -> ColumnRun:
    """The student's function with this rank's shard of the weight."""
    x, weight, dy = column_inputs(comm.size)
    x.requires_grad_()
    shard = weight.chunk(comm.size, 0)[comm.rank].clone().requires_grad_()
    with listen() as in_forward:
        y = student.apply(comm, x, shard)  # type: ignore[attr-defined]
    dx = dweight = None
    with listen() as in_backward, MatmulRecorder(in_backward) as matmuls:
        if isinstance(y, Tensor) and y.requires_grad and y.shape == (TOKENS, 4):
            y.backward(dy.chunk(comm.size, 1)[comm.rank])
            dx, dweight = x.grad, shard.grad
    forward, backward = ([event.op for event in events] for events in (in_forward, in_backward))
    return ColumnRun(detached(y), dx, dweight, forward, backward, matmuls.counts)


def right_column(size: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dweight of this rank."""
    x, weight, dy = column_inputs(size)
    own_dy = dy.chunk(size, 1)[rank]
    return x @ weight.chunk(size, 0)[rank].T, dy @ weight, own_dy.T @ x


# ---- mlp


def whole_mlp() -> tuple[Tensor, nn.Linear, nn.Linear]:
    """x and the two layers, with nonzero biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        x, up, down = torch.randn(TOKENS, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    return x.requires_grad_(), up, down


def mlp_shards(size: int, rank: int, up: nn.Linear, down: nn.Linear) -> list[Tensor]:
    """This rank's weight and bias of `up`, then of `down`."""
    whole = [(up.weight, 0), (up.bias, 0), (down.weight, 1)]
    shards = [p.detach().chunk(size, dim)[rank] for p, dim in whole]
    return [*shards, down.bias.detach()]


def run_mlp(comm: Any, student: Student) -> tuple[Any, list[Any]]:
    """y, and the gradients of x and of this rank's shards."""
    x, up, down = whole_mlp()
    layers = [nn.Linear(WIDTH, HIDDEN // comm.size), nn.Linear(HIDDEN // comm.size, WIDTH)]
    params = [p for layer in layers for p in (layer.weight, layer.bias)]
    for p, shard in zip(params, mlp_shards(comm.size, comm.rank, up, down)):
        p.data.copy_(shard)
    y = student(comm, x, *layers)
    if isinstance(y, Tensor) and y.requires_grad and y.shape == x.shape:
        (y * drawn(TOKENS, WIDTH, seed=5)).sum().backward()
    return detached(y), [x.grad, *(p.grad for p in params)]


def right_mlp(size: int, rank: int) -> tuple[Tensor, list[Tensor]]:
    """y and the gradients, computed in one process."""
    x, up, down = whole_mlp()
    y = down(F.gelu(up(x)))
    (y * drawn(TOKENS, WIDTH, seed=5)).sum().backward()
    for p in (*up.parameters(), *down.parameters()):
        assert p.grad is not None
        p.data = p.grad
    assert x.grad is not None
    return y.detach(), [x.grad, *(g.clone() for g in mlp_shards(size, rank, up, down))]


# ---- cross_entropy

CE_TOKENS = 7


def example_logits(size: int, large: float) -> tuple[Tensor, Tensor]:
    """All logits [n, v] and targets [n], the same on every rank."""
    vocab = 10 * size
    generator = torch.Generator().manual_seed(9)
    targets = torch.randint(vocab, (CE_TOKENS,), generator=generator)
    targets[:size] = torch.arange(size) * 10 + 3  # at least one target per rank
    return drawn(CE_TOKENS, vocab, seed=10) * large, targets


def run_cross_entropy(comm: Any, student: Student, large: float) -> tuple[Any, Any]:
    """The loss, and the gradient of this rank's logits."""
    logits, targets = example_logits(comm.size, large)
    shard = logits.chunk(comm.size, 1)[comm.rank].clone().requires_grad_()
    loss = student(comm, shard, targets)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        loss.backward()
    return detached(loss), shard.grad


def right_cross_entropy(size: int, rank: int, large: float) -> tuple[Tensor, Tensor]:
    """The loss of the unsharded logits, and this rank's shard of their gradient."""
    logits, targets = example_logits(size, large)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad.chunk(size, 1)[rank].clone()
