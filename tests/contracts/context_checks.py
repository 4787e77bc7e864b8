"""What context parallelism promises, on ranks: for its tests and its mutations."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labkit import Comm, Mesh, full_state_dict, listen, tensor_parallel
from labkit.events import CommEvent
from labkit.memory.edits import Recompute
from labkit.memory.peak import PeakMemory
from labkit.memory.saved import saved_by
from labkit.models import GPT
from labkit.models.attention import CausalAttention
from labkit.parallel.context import context_parallel as context
from labkit.parallel.context import ring_attention as ring
from labkit.parallel.context import ulysses, zigzag
from labkit.predict.context import ring_attention_bytes, ring_step_scores, ulysses_bytes
from shard_cases import optimizer_of, wrapped
from small_models import difference

AGREE = 1e-10
STEPS, ROWS, LENGTH, VOCAB = 3, 2, 48, 31  # 48 splits into 2n chunks for 1, 2, 3 and 4 ranks


def core(way: str, tile: int = 7) -> nn.Module:
    if way == "ring":
        return ring.RingAttention(Comm(), tile)
    return ulysses.Ulysses(CausalAttention(0.0), Comm())


def some(
    heads: int, groups: int, length: int, dtype: torch.dtype = torch.float64, width: int = 4
) -> list[Tensor]:
    """q, k, v and the gradient of the result, whole, the same on all ranks."""
    generator = torch.Generator().manual_seed(heads + groups + length)
    return [
        torch.randn(2, n, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for n in (heads, groups, groups, heads)
    ]


def shards(whole: list[Tensor], strided: bool = False) -> list[Tensor]:
    """Of this rank, with a gradient to come; `strided`: in memory as a model's heads are."""
    found = [zigzag.sequence_shard(x, Comm(), dim=2) for x in whole]
    if strided:
        found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
    return [x.detach().requires_grad_() for x in found]


def attention_is_exact(
    way: str, heads: int, groups: int, length: int, dtype: torch.dtype = torch.float64,
    limit: float = AGREE, scale: float = 1.0, strided: bool = True,
) -> None:  # fmt: skip
    whole = some(heads, groups, length, dtype)
    whole[0] *= scale
    mine = shards(whole, strided)
    out = core(way)(*mine[:3])
    found = [out, *torch.autograd.grad(out, mine[:3], mine[3])]
    exact = [x.double().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*exact[:3], is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(expected, exact[:3], exact[3])
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, [expected, *grads], strict=True):
        assert x.dtype == dtype
        there = zigzag.sequence_shard(y, Comm(), dim=2)
        off = ((x - there).abs().max() / there.abs().max().clamp(min=1)).item()
        assert off < limit, f"{name} is off by {off:.1e}"


def training_equals_one_process(
    way: Any, strategy: str = "ddp", recompute: Any = None, axes: dict[str, int] | None = None,
    tensor: dict[str, Any] | None = None, tensor_first: bool = False, **sizes: Any,
) -> None:  # fmt: skip
    """The weights after three steps of AdamW. `tensor`: tensor parallelism, too, with options."""
    mesh = Mesh(**(axes or {"dp": 1, "cp": Comm().size}))
    comm = mesh["dp", "cp"]
    torch.manual_seed(0)
    module = GPT(VOCAB, 48, 2, 24, LENGTH, **{"kv_heads": 12, **sizes}).double()
    alone = copy.deepcopy(module)
    edits = [lambda: context.context_parallel(module, mesh.cp, way=way)]
    if tensor is not None:
        edits.insert(not tensor_first, lambda: tensor_parallel(module, mesh.tp, **tensor))
    for edit in edits:
        edit()
    if recompute:
        Recompute(module, what=recompute)
    make = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    model = wrapped(strategy, module, comm)
    stepper = optimizer_of(strategy, model.parameters(), make, comm, bucket_mb=25)
    reference = make(alone.parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        rows = whole.chunk(mesh.dp.size)[mesh.dp.rank]
        mine = [zigzag.sequence_shard(t, mesh.cp) for t in (rows[:, :-1], rows[:, 1:])]
        for one, optimizer, (x, y) in (
            (model, stepper, mine),
            (alone, reference, (whole[:, :-1], whole[:, 1:])),
        ):
            optimizer.zero_grad()
            F.cross_entropy(one(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
    off = difference(full_state_dict(model), alone.state_dict())
    assert off < AGREE, f"weights are off by {off:.1e}"


def bytes_are_those_predicted(way: str, dtype: torch.dtype = torch.float32) -> None:
    comm, size = Comm(), Comm().size
    heads, groups, length = 24, 12, LENGTH
    mine = shards(some(heads, groups, length, dtype))
    with listen() as forward:
        out = core(way)(*mine[:3])
    with listen() as backward:
        out.backward(mine[3])
    shape = {"sequence": length, "rows": 2, "head_width": 4, "ranks": size}
    shape |= {"kv_heads": groups, "element_bytes": dtype.itemsize}
    if way == "ring":
        expected = [ring_attention_bytes(**shape, backward=b) for b in (False, True)]
        names, counts = {"ring_exchange"}, [comm.size - 1, 2 * (comm.size - 1)]
    else:
        expected = [ulysses_bytes(**shape, heads=heads)] * 2
        names, counts = {"all_to_all"}, [4, 4]
    for events, nbytes, count in zip((forward, backward), expected, counts, strict=True):
        assert {event.op for event in events} <= names
        assert len(events) == count, f"{len(events)} operations, not {count}"
        sent = sum(event.bus_bytes for event in events)
        assert sent == nbytes, f"{sent} bytes sent, {nbytes} predicted"


@contextmanager
def around_compute(note: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Each piece of attention that the ring computes is handed to `note`, which calls it."""

    def noted(compute: Any) -> Callable[..., Any]:
        return lambda *args: note(lambda: compute(*args))

    with (
        patch.object(ring, "flash_forward", noted(ring.flash_forward)),
        patch.object(ring, "flash_backward", noted(ring.flash_backward)),
    ):
        yield


def every_rank_computes_as_much(length: int = 96) -> None:
    """In FLOPs, in all and in each step. One process has n times as much, but the diagonal."""
    comm = Comm()
    block, tile = length // comm.size, length // comm.size // 4
    mine = shards(some(4, 2, length))
    steps: list[list[int]] = []

    def counted(compute: Callable[[], Any]) -> Any:
        with FlopCounterMode(display=False) as flops:
            found = compute()
        steps[-1].append(flops.get_total_flops())
        return found

    with around_compute(counted):
        steps.append([])
        out = ring.ring_attention(*mine[:3], comm, tile)
        steps.append([])
        out.backward(mine[3])
    everyone = comm.all_gather_object(steps)
    assert all(one == everyone[0] for one in everyone), f"operations of each step: {everyone}"
    per_score = 2 * 2 * 4, 2 * 5 * 4  # two products forward and five backward, of width 4
    for found, flops in zip(everyone[0], per_score, strict=True):
        others = ring_step_scores(block, heads=4, rows=2) * flops
        own = (block // tile) * (block // tile + 1) / 2 * tile**2 * 2 * 4 * flops
        assert found == [own] + [others] * (comm.size - 1), f"{found}, not {own} and {others}"


def blocks_travel_while_the_rank_computes() -> None:
    """Exchanges are issued before a step computes, awaited after it, in forward and backward; the
    last gradients have nothing beside them."""
    comm = Comm()
    mine = shards(some(4, 2, LENGTH))
    spans: list[tuple[float, float]] = []

    def timed(compute: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        found = compute()
        spans.append((began_s, time.monotonic()))
        return found

    def beside(events: list[CommEvent]) -> list[list[int]]:
        """The steps whose computing lies between an exchange's issue and the wait for it."""
        return [
            [i for i, (a, b) in enumerate(spans) if e.issued_s <= a and b <= e.wait_began_s]
            for e in events
        ]

    with around_compute(timed):
        with listen() as events:
            out = ring.ring_attention(*mine[:3], comm, 8)
        assert beside(events) == [[step] for step in range(comm.size - 1)], beside(events)
        spans.clear()
        with listen() as events:
            out.backward(mine[3])
    expected = [[0]]  # the first block; then, as they are asked for,
    for step in range(1, comm.size):
        # the next block, beside this step; and this one's gradient, beside the next step
        expected += [[step], [step + 1]] if step < comm.size - 1 else [[]]
    assert beside(events) == expected, f"{beside(events)}, not {expected}"


def memory_is_linear_in_the_shard(tile: int = 8) -> None:
    """To the byte: what is kept, and both peaks, as so many tensors of a shard's size."""
    comm = Comm()
    rows, heads, groups, width = 2, 2, 1, 16
    for shard in (64, 128):
        mine = shards(some(heads, groups, shard * comm.size, torch.float32, width))
        module = ring.RingAttention(comm, tile)
        block = 2 * 4 * rows * groups * shard * width  # of k and v
        out = 4 * rows * heads * shard * width
        row = 4 * rows * heads * shard  # of L
        kept = sum(x.nbytes for x in saved_by(module, *mine[:3]))
        assert kept == block + 2 * out + row, f"{kept} bytes kept"
        with PeakMemory() as forward:
            result = module(*mine[:3])
        with PeakMemory() as backward:
            result.backward(mine[3])
        # Two blocks; out, its part of a step and the two as they are merged, each with its rows.
        allowed = 2 * block + 3 * out + 4 * row
        assert forward.peak_bytes <= allowed, f"{forward.peak_bytes} bytes, not {allowed}"
        # Two blocks; gradients at home, growing, arriving, found and stacked; dq twice.
        allowed = 7 * block + 2 * out
        assert backward.peak_bytes <= allowed, f"{backward.peak_bytes} bytes, not {allowed}"
