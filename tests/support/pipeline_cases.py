"""What a pipeline promises, on ranks: for test_pipeline.py and test_pipeline_mutations.py."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labkit import DDP, GPT, Comm, Mesh, listen
from labkit.comm import listen_with
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from labkit.schedules import Action, Schedule, peak_in_flight, run_order, schedule
from labkit.schedules.actions import chunks_of
from recorded_memory import without_collector
from small_models import Custom, difference

SYNCHRONOUS = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1}
DATA = {"activation": 101, "gradient": 102}  # tags


def line(size: int) -> Comm | None:
    """The first `size` ranks; None on the others. All ranks call it."""
    return Comm() if size == Comm().size else Comm().subgroup(range(size))


def layers(count: int, width: int = 3, seed: int = 0, bias: bool = True) -> list[nn.Module]:
    """Layers of different kinds, in fp64: linear and tanh, a norm, two linear layers."""
    torch.manual_seed(seed)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()),
        lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)),
        lambda: nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width, bias=False)),
    ]
    return [kinds[i % 3]().double() for i in range(count)]


def batch(rows: int = 9, width: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(rows, 2, width).double(), torch.randn(rows, 2, width).double()


@torch.no_grad()
def descend(module: nn.Module) -> None:
    """A step of plain gradient descent, which forgives no factor, as Adam does."""
    for p in module.parameters():
        if p.grad is not None:
            p -= 0.3 * p.grad


def trained(module: nn.Module, x: Tensor, y: Tensor, loss_fn: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        module.zero_grad()
        loss = loss_fn(module(x), y)
        loss.backward()
        descend(module)
        losses.append(loss.item())
    return losses


def piped(pipe: Pipeline, x: Tensor, y: Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        pipe.zero_grad()
        loss = pipe.step(x, y)
        descend(pipe)
        losses += [] if loss is None else [loss.item()]
    return losses


def assert_same(pipe: Pipeline, whole: nn.Module, mine: Any, losses: Any, told: Any) -> None:
    found = dict(pipe.module.named_parameters())
    named = dict(whole.named_parameters(remove_duplicate=False))
    off = difference(found, {name: named[name] for name in found})
    assert found and off <= 1e-10, f"{told}: off by {off}"
    for one, other in zip(mine, losses):
        assert abs(one - other) <= 1e-10, f"{told}: loss {one} instead of {other}"


def admissible(name: str, size: int) -> list[int]:
    """Numbers of micro-batches from 1 to 9 that this schedule can do."""
    least = {"zb-h1": size, "zb-h2": 2 * size - 1}.get(name, 1)
    return [m for m in range(least, 10) if name != "interleaved" or m % size == 0]


def equals_one_process(sizes: Sequence[int], names: Sequence[str], ms: Any = None) -> int:
    """Weights and losses of two steps, to 1e-10; returns how many pipelines were compared."""
    compared = 0
    x, y = batch()
    for size in sizes:
        comm = line(size)
        if comm is None:
            continue
        for name in names:
            count = size * SYNCHRONOUS[name]
            whole = nn.Sequential(*layers(count))
            losses = trained(whole, x, y, F.mse_loss, 2)
            for m in ms or admissible(name, size):
                pipe = Pipeline(layers(count), comm, name, m, F.mse_loss)
                mine = piped(pipe, x, y, 2)
                assert (len(mine) == 2) == (comm.rank == size - 1)
                assert_same(pipe, whole, mine, losses, f"{name}, {size} stages, {m} micro-batches")
                compared += 1
    return compared


def tokens_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gpt(blocks: int = 4, **how: Any) -> GPT:
    torch.manual_seed(3)
    return GPT(11, 8, blocks, 2, 5, **how).double()


def a_gpt_with_a_tied_embedding(
    size: int, name: str = "1f1b", m: int = 4, freeze: bool = False
) -> None:
    """The embedding is the head; with `freeze`, the first block and all norms are frozen, too."""
    comm = line(size)
    if comm is None:
        return
    torch.manual_seed(4)
    x, y = torch.randint(0, 11, (7, 5)), torch.randint(0, 11, (7, 5))

    def model() -> GPT:
        made = gpt(size * SYNCHRONOUS[name] + 1)
        if freeze:
            for key, p in made.named_parameters():
                p.requires_grad_("norm" not in key and not key.startswith("blocks.0."))
        return made

    whole = model()
    losses = trained(whole, x, y, tokens_loss, 3)
    torch.manual_seed(5 + comm.rank)
    own = model()
    if comm.rank == size - 1 and size > 1:  # an owner's copy begins as the first owner's
        own.head.weight.data.zero_()
    pipe = Pipeline(split(own, size * SYNCHRONOUS[name]), comm, name, m, tokens_loss)
    mine = piped(pipe, x, y, 3)
    assert_same(pipe, whole, mine, losses, f"tied, {name}, {size} stages")


def sends_exactly_its_bytes(name: str) -> None:
    """rows x rest x itemsize a boundary, direction, micro-batch; shapes in the first step."""
    comm = Comm()
    size, chunks, m = comm.size, SYNCHRONOUS[name], 6
    x, y = batch(rows=8)  # micro-batches of 2, 2, 1, 1, 1, 1
    rows = [2, 2, 1, 1, 1, 1]
    pipe = Pipeline(layers(size * chunks), comm, name, m, F.mse_loss)
    for step in range(2):
        with listen() as events:
            pipe.step(x, y)
        found = Counter(
            (e.tag, e.peer, e.bus_bytes) for e in events if e.op == "send" and e.tag != 103
        )
        wanted: Counter[Any] = Counter()
        for chunk in range(chunks):
            index = chunk * size + comm.rank
            for n in rows:
                nbytes = n * 2 * 3 * 8
                if index < size * chunks - 1:
                    wanted[DATA["activation"], (comm.rank + 1) % size, nbytes] += 1
                if index > 0:
                    wanted[DATA["gradient"], (comm.rank - 1) % size, nbytes] += 1
        assert found == wanted, f"{name}: {found - wanted} too many, {wanted - found} missing"
        looks = sum(e.tag == 103 and e.op == "send" for e in events)
        boundaries = chunks - (comm.rank == size - 1)
        assert looks == (boundaries if step == 0 else 0), f"{looks} looks in step {step}"
        assert {e.op for e in events} <= {"send", "recv"}


class SavedBox:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Saved(saved_tensors_hooks):
    """The tensors that autograd saves in this block and still holds, but for `weights`."""

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        self.alive: weakref.WeakSet[SavedBox] = weakref.WeakSet()
        self.peak = self.peak_bytes = 0
        self.places = {p.untyped_storage().data_ptr() for p in weights}
        super().__init__(self.save, lambda box: box.x)

    def save(self, x: Tensor) -> SavedBox:
        box = SavedBox(x)
        if x.untyped_storage().data_ptr() not in self.places:
            self.alive.add(box)
            self.peak = max(self.peak, len(self.alive))
            self.peak_bytes = max(self.peak_bytes, sum(one.x.nbytes for one in self.alive))
        return box


class Counted(nn.Module):
    """Its activation is a tensor whose life can be watched: [rows, width] -> the same."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    peak = 0

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Watched.apply(self.linear(x)))


def after_each_action(stage: Any, note: Callable[[], None]) -> None:
    run = stage.run

    def noting(action: Any, came: Any) -> Any:
        result = run(action, came)
        note()
        return result

    stage.run = noting


class _Token:
    """Lives as long as the graph of one forward has what it saved."""


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = _Token()
        Counted.alive.add(ctx.token)
        Counted.peak = max(Counted.peak, len(Counted.alive))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def frees_activations(name: str, m: int) -> None:
    """No more graphs live than the schedule says, and none after the step, without the collector of
    cycles. (Where backward comes in halves, a graph goes with the first, and what the second needs,
    with it.)"""
    comm = Comm()
    chunks = SYNCHRONOUS[name]
    torch.manual_seed(0)
    stages: list[nn.Module] = [Counted() for _ in range(comm.size * chunks)]
    x, y = batch(rows=m)
    Counted.alive.clear()
    Counted.peak = 0
    pipe = Pipeline(stages, comm, name, m, F.mse_loss)
    held: list[int] = []  # micro-batches kept: input, graph, what a second half of backward needs
    for stage in pipe._stages:
        after_each_action(stage, lambda: held.append(sum(len(s.in_flight) for s in pipe._stages)))
    with without_collector():
        pipe.step(x, y)
        left = len(Counted.alive)
    lists = pipe.schedule
    promised = peak_in_flight(lists)[comm.rank]
    assert left == 0, f"{name}: {left} graphs outlive the step"
    assert max(held) == promised and held[-1] == 0, f"{name}: {held} kept, not {promised}"
    in_halves = any(one.phase == "input" for one in lists[comm.rank])
    as_promised = Counted.peak <= promised if in_halves else Counted.peak == promised
    assert as_promised, f"{name}: {Counted.peak} in flight, not {promised}"


def frees_what_is_saved(name: str, m: int) -> None:
    """Only inputs and gradients of micro-batches in flight live, and none after the step."""
    comm = Comm()
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3).double() for _ in range(comm.size)]
    x, y = batch(rows=m)
    saved = Saved([p for one in stages for p in one.parameters()])
    pipe = Pipeline(stages, comm, name, m, lambda out, y: (out * y).mean())
    pipe.step(x, y)
    with without_collector():
        with saved:
            pipe.step(x, y)
        left = len(saved.alive)
    assert left == 0, f"{name}: {left} saved tensors outlive the step"
    each = 2 if comm.rank == comm.size - 1 else 1  # the loss saves its target
    promised = peak_in_flight(pipe.schedule)[comm.rank]
    assert saved.peak <= each * promised + 2, f"{name}: {saved.peak} saved, {promised} in flight"


def outputs_go_when_they_are_sent() -> None:
    """An output that no backward needs is not kept beside the graph: only what is under way."""
    comm = Comm()
    made: list[Any] = []

    def output(stage: Any, x: Tensor) -> Tensor:
        y = x + stage.weight  # saves nothing
        made.append(weakref.ref(y.untyped_storage()))
        return y

    held: list[int] = []
    stages = [Custom(output, weight=nn.Parameter(torch.ones(3).double())) for _ in range(comm.size)]
    pipe = Pipeline(stages, comm, "gpipe", 8, lambda out, y: (out * y).mean())
    mail = pipe._p2p
    receive = mail.receive

    def counting(message: Any) -> Any:
        if message.what == "gradient":
            mail._release_sent()
            held.append(sum(one() is not None for one in made) - len(mail._pending_sends))
        return receive(message)

    mail.receive = counting
    pipe.step(*batch(rows=8))
    if comm.rank == 0:
        assert max(held) <= 1, f"{held} outputs are kept after they were sent"


def sends_overlap_compute() -> None:
    """By the order of events: receives are posted ahead, results leave at once, and no send is
    waited for while there is something to compute."""
    comm = Comm()
    m = 6
    log: list[Any] = []

    def noted(stage: Any, x: Tensor) -> Any:
        log.append(("forward", None))
        return stage.linear(x)

    stages = [Custom(noted, linear=nn.Linear(3, 3).double()) for _ in range(comm.size)]
    pipe = Pipeline(stages, comm, "gpipe", m, F.mse_loss)
    x, y = batch(rows=m)
    pipe.step(x, y)
    log.clear()
    with listen_with(lambda event: log.append((event.op, event))):
        pipe.step(x, y)
    sends, receives = ([x for op, x in log if op == what] for what in ("send", "recv"))
    assert not any(one.blocking for one in sends + receives), "a message is waited for at once"
    place = [i for i, (op, _) in enumerate(log) if op == "forward"]
    out, posts = (
        [i for i, (op, x) in enumerate(log) if op == what and x.tag == DATA["activation"]]
        for what in ("send", "recv")
    )
    if comm.rank < comm.size - 1:  # the first forwards of gpipe wait for nobody on stage 0
        assert len(out) == m and all(a < b for a, b in zip(place, out)), "sent after its compute"
        assert all(b < c for b, c in zip(out, place[1:])), "the result leaves at once"
    if comm.rank > 0:  # the receive of k + 1 is posted before the forward of k
        assert all(posts[k + 1] < place[k] for k in range(m - 1)), "no receive is posted ahead"
    for one in sends:
        assert one.wait_ended_s, "every send is known to have arrived when the step ends"
    # A wait for a send takes no time before the last receive has come: it was over already.
    last_s = max((one.wait_began_s for one in receives), default=0.0)
    early = [one for one in sends if one.wait_began_s and one.wait_began_s < last_s]
    assert all(one.ended_s <= one.wait_ended_s for one in early)


def does_not_wait_for_sends() -> None:
    """Stage 0 ends its forwards before stage 1 takes the first message, which stays under way."""
    comm = Comm()
    m = 4
    done: list[bool] = []

    def held(stage: Any, x: Tensor) -> Any:
        """Stage 1's first forward runs only when stage 0 says that it has computed all of its."""
        y = stage.linear(x)
        done.append(True)
        if comm.rank == 0 and len(done) == m:
            comm.isend(torch.ones(1), 1, 7).wait()
        if comm.rank == 1 and len(done) == 1:
            comm.recv(torch.ones(1), 0, 7)
        return y

    stages = [Custom(held, linear=nn.Linear(3, 3).double()) for _ in range(comm.size)]
    pipe = Pipeline(stages, comm, "gpipe", m, F.mse_loss)
    pipe.step(*batch(rows=m))
    assert len(done) == m


def recompute_is_equal_to_the_bit(name: str) -> None:
    """With dropout: the same masks again; and less is saved between forward and backward."""
    comm = Comm()
    x, y = batch(rows=5)
    found, saved_bytes = [], []
    for again in (False, True):
        stages = [nn.Sequential(one, nn.Dropout(0.3)) for one in layers(comm.size)]
        pipe = Pipeline(stages, comm, name, 5, F.mse_loss, recompute=again)
        torch.manual_seed(7 + comm.rank)
        losses = piped(pipe, x, y, 3)
        with (saved := Saved()):
            pipe.step(x, y)
        saved_bytes.append(saved.peak_bytes)
        found.append((losses, [p.detach().clone() for p in pipe.parameters()]))
    (losses, weights), (others, again_weights) = found
    assert losses == others, "the losses are others"
    # (On the others, the last stage's backward follows at once.)
    assert comm.rank or saved_bytes[1] < saved_bytes[0] / 2, f"{saved_bytes} bytes are saved"
    assert all(torch.equal(a, b) for a, b in zip(weights, again_weights, strict=True))


def replicas_synchronise_once(name: str) -> None:
    """2 stages x 2 replicas: a bucket is reduced once a step; weights are those of one process."""
    mesh = Mesh(pp=2, dp=2)
    chunks, m = SYNCHRONOUS[name], 4
    x, y = batch(rows=8)
    whole = nn.Sequential(*layers(2 * chunks))
    trained(whole, x, y, F.mse_loss, 3)
    mine_x, mine_y = (one.split(4)[mesh.dp.rank] for one in (x, y))
    stages = [
        DDP(one, mesh.dp) if index % 2 == mesh.pp.rank else one
        for index, one in enumerate(layers(2 * chunks))
    ]
    pipe = Pipeline(stages, mesh.pp, name, m, F.mse_loss)
    for step in range(3):
        pipe.zero_grad()
        with listen() as events:
            pipe.step(mine_x, mine_y)
        reduced = sum(e.op == "all_reduce" for e in events)
        assert reduced == chunks or step == 0, f"{reduced} all-reduces in a step, not {chunks}"
        descend(pipe)
    assert_same(pipe, whole, [], [], f"{name} in DDP")


def pipedream_equals_stale_weights(m: int) -> None:
    """One process computes each micro-batch at the weights that its stage had in its forward; a
    synchronous run ends elsewhere."""
    comm = Comm()
    size = comm.size
    x, y = batch(rows=m)
    made = layers(size)

    pipe = Pipeline(
        layers(size), comm, "pipedream", m, F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.5),
    )  # fmt: skip
    versions = pipe._stages[0].versions
    kept: list[int] = []
    after_each_action(
        pipe._stages[0], lambda: kept.append(len({id(one) for one in versions._used.values()}))
    )
    pipe.step(x, y)
    loss = pipe.step(x, y)

    stale, losses = oracle_of_pipedream(made, schedule("pipedream", size, m), x, y, rounds=2)
    last = [] if loss is None else [loss.item()]
    assert_same(pipe, nn.Sequential(*stale), last, [sum(losses[-m:]) / m], "pipedream")
    most = size - comm.rank  # a version for each micro-batch in flight
    assert max(kept) == most or m <= 2 * size, f"{max(kept)} versions are kept, not {most}"
    assert max(kept) <= most and kept[-1] == 0, f"{kept} versions are kept, for {most} in flight"
    if m > 1 and comm.rank == 0:
        fresh, _ = oracle_of_pipedream(layers(size), one_at_a_time(size, m), x, y, rounds=2)
        pairs = zip(fresh[0].parameters(), stale[0].parameters(), strict=True)
        assert any((a - b).abs().max() > 1e-6 for a, b in pairs), "nothing was stale"


def one_at_a_time(size: int, m: int) -> Schedule:
    one = [Action(phase, k) for k in range(m) for phase in ("forward", "backward", "update")]
    return [list(one) for _ in range(size)]


def oracle_of_pipedream(
    stages: list[nn.Module], lists: Schedule, x: Tensor, y: Tensor, rounds: int
) -> tuple[list[nn.Module], list[float]]:
    """The order of one process: by hand, with copies of weights, and no code of the pipeline."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.3, momentum=0.5) for one in stages]
    losses = []
    for _ in range(rounds):
        kept: dict[Any, Any] = {}
        outs: dict[Any, Tensor] = {(-1, k): x[k : k + 1] for k in range(len(x))}
        grads: dict[Any, Any] = {}
        for stage, position in run_order(lists):
            action = lists[stage][position]
            k = action.microbatch
            if action.phase == "forward":
                then = copy.deepcopy(stages[stage])
                given = outs[stage - 1, k].detach().requires_grad_()
                out = then(given)
                kept[stage, k] = then, given, out
                outs[stage, k] = out
                if stage == len(stages) - 1:
                    value = F.mse_loss(out, y[k : k + 1])
                    losses.append(value.item())
                    kept[stage, k] = then, given, value
            elif action.phase == "backward":
                then, given, out = kept[stage, k]
                out.backward(grads.get((stage + 1, k)))
                grads[stage, k] = given.grad
            else:
                then = kept[stage, k][0]
                for p, q in zip(stages[stage].parameters(), then.parameters(), strict=True):
                    p.grad = q.grad
                optimizers[stage].step()
    return stages, losses


def own_schedule(lists: Schedule) -> None:
    comm = Comm()
    x, y = batch()
    count = comm.size * chunks_of(lists)
    whole = nn.Sequential(*layers(count))
    losses = trained(whole, x, y, F.mse_loss, 2)
    pipe = Pipeline(layers(count), comm, lists, loss_fn=F.mse_loss)
    mine = piped(pipe, x, y, 2)
    assert_same(pipe, whole, mine, losses, "a schedule of one's own")
