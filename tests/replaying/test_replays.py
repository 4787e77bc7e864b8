"""Recorded runs replayed on described clusters: by hand, by laws, and beside published times."""

import csv
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from labkit import GPT, Comm, CommEvent, World, dry_run, record, replay, split_of, tensor_parallel
from labkit.clusters import Cluster, Device, Level, cluster
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.recipes import RECIPES
from labkit.replaying import Costs, Deadlock, bubble, pipeline_trace, stage_seconds
from labkit.replaying.dry_runs import fits, largest_that_fits, peak_of
from labkit.schedules import one_f_one_b
from labkit.trace import MemoryPoint, Operation, RankTrace, Span, Step, Trace
from labkit.trace.graph import groups_like
from labkit.trace.measures import communicating, length_s
from laws import broken_laws
from places import PUBLISHED
from small_models import take_steps
from tables import cases, raises

PLAIN = Device("plain", {"float32": 1e9}, 1e9, 1e9, 0.0)


def plain(nodes: int = 1, devices: int = 4, latency_s: float = 0.0) -> Cluster:
    """A GB/s everywhere, a billion operations and bytes a second, no latency unless asked for."""
    inside = Level("inside", 1e9, latency_s, devices)
    between = Level("between", 1e9, latency_s, devices)
    return Cluster("plain", "a plain cluster", PLAIN, nodes, devices, inside, between)


def event(op: str, seq: int, at_s: float, rank: int, size: int = 2, **more: object) -> CommEvent:
    """Of a GB: a second on the plain cluster. Waited for at `wait_s`, if given."""
    wait_s = more.pop("wait_s", None)
    one = CommEvent(
        op, "default", tuple(range(size)), rank, seq, "float32", (), 10**9, 10**9,
        blocking=False, issued_s=at_s, began_s=at_s, ended_s=at_s, wait_began_s=at_s,
        **more,
    )  # fmt: skip
    if wait_s is not None:
        one.wait_began_s, one.wait_ended_s = wait_s, wait_s + 0.1
    return one


def computed(at_s: float, flops: int) -> Operation:
    return Operation(at_s, 0, "mm", "float32", flops, 0)


def rank_of(number: int, size: int, *things: object, until_s: float = 100.0) -> RankTrace:
    one = RankTrace(number, size, steps=[Step(0, 0.0, until_s, detail=True)])
    kinds = {CommEvent: one.comms, Operation: one.operations, Span: one.spans}
    for thing in things:
        kinds[type(thing)].append(thing)
    one.operations.append(computed(until_s, 0))
    one.memory.append(MemoryPoint(until_s / 2, 0, (1, 0, 0, 0, 0, 0)))
    return one


def trace_of(*ranks: list[object], until_s: float = 100.0) -> Trace:
    traces = [rank_of(rank, len(ranks), *of, until_s=until_s) for rank, of in enumerate(ranks)]
    return Trace(dict(enumerate(traces)))


def both_reduce(at_s: float = 2.0, wait_s: float = 2.0) -> list[CommEvent]:
    """The all-reduce on each of two ranks."""
    return [event("all_reduce", 1, at_s, rank, wait_s=wait_s) for rank in (0, 1)]


def step_s(trace: Trace) -> float:
    return max(one.steps[-1].ended_s for one in trace.ranks.values())


def test_communication_runs_beside_computing_and_is_waited_for_where_the_program_waits() -> None:
    """2 s of computing, an all-reduce of 1 s beside 0.25 s more, then a wait, then 0.5 s."""
    things = [Span("backward", "", 0, 1.0, 20.0), computed(2, 2 * 10**9)]
    things += [computed(12, 25 * 10**7), computed(30, 5 * 10**8)]
    trace = trace_of(*([*things, reduced] for reduced in both_reduce(10.0, 15.0)))
    replayed = replay(trace, plain())
    assert broken_laws(replayed) == []
    one = replayed.ranks[0]
    (comm,), (span,) = one.comms, one.spans
    assert (comm.issued_s, comm.began_s, comm.ended_s) == (2.0, 2.0, 3.0)
    assert (comm.wait_began_s, comm.wait_ended_s) == (2.25, 3.0)
    assert (span.began_s, span.ended_s) == (0.0, 3.0)
    assert (one.steps[0].began_s, one.steps[0].ended_s, one.steps[0].detail) == (0.0, 3.5, False)
    assert one.memory[0].when_s == 3.5
    split = split_of(replayed)
    assert (split.step_s, split.compute_s, split.exposed_s, split.bubble_s) == (3.5, 2.75, 0.75, 0)
    assert split_of(replay(trace, plain())) == split, "to the last digit"


def test_a_rank_that_is_slower_makes_the_others_wait() -> None:
    first, second = both_reduce()
    trace = trace_of([computed(1, 10**9), first], [computed(1, 3 * 10**9), second])
    split = split_of(replay(trace, plain()))
    # Rank 0 waits 2 s for rank 1, and both for 1 s of all-reduce: 2 s x 2/2 on a wire of 1 GB/s.
    assert (split.step_s, split.compute_s, split.exposed_s, split.bubble_s) == (4, 2, 1, 1)


def test_messages_on_one_wire_leave_in_order() -> None:
    def reduces(rank: int) -> list[CommEvent]:
        return [event("all_reduce", k, float(k), rank, wait_s=50.0 + k) for k in (1, 2, 3)]

    replayed = replay(trace_of(reduces(0), reduces(1)), plain())
    times = [(event.began_s, event.ended_s) for event in replayed.ranks[1].comms]
    assert times == [(0, 1), (1, 2), (2, 3)]


def test_a_message_arrives_where_it_is_waited_for() -> None:
    send = event("send", 1, 5.0, 0, peer=1, wait_s=6.0)
    receive = event("recv", 1, 1.0, 1, peer=0, wait_s=2.0)
    trace = trace_of([computed(1, 10**9), send], [receive, computed(9, 10**9)])
    replayed = replay(trace, plain(latency_s=0.5))
    assert broken_laws(replayed) == []
    assert [(x.began_s, x.ended_s) for x in replayed.ranks[1].comms] == [(1.0, 2.5)]
    assert replayed.ranks[1].steps[0].ended_s == 3.5


def test_ranks_that_wait_for_each_other_are_reported_with_the_cycle() -> None:
    def receives_first(rank: int) -> list[CommEvent]:
        ends = [("recv", 1.0), ("send", 5.0)]
        return [event(op, 1, at_s, rank, peer=1 - rank, wait_s=at_s) for op, at_s in ends]

    trace = trace_of(receives_first(0), receives_first(1))
    words = "rank 0 waits for message 1 from rank 1 to 0, which rank 1 has yet to issue"
    assert sorted(raises(words, replay, trace, plain(), error=Deadlock).cycle) == [0, 1]


def test_measured_computing_keeps_its_times_and_takes_the_wires_of_the_cluster() -> None:
    forward = Span("forward", "", 0, 0.5, 1.5)
    trace = trace_of(*([x, forward] for x in both_reduce(wait_s=3.0)), until_s=4.0)
    for one in trace.ranks.values():
        one.steps[0].detail = False
    replayed = replay(trace, plain(), computing="measured")
    one = replayed.ranks[0]
    # 2 s until the issue, 1 s until the wait, by which the second of communication is over; the
    # 0.1 s that were waited are no computing; 0.9 s remain.
    assert one.comms[0].ended_s == one.comms[0].wait_ended_s == 3.0
    assert (one.spans[0].began_s, one.spans[0].ended_s) == (0.5, 1.5)
    assert step_s(replayed) == pytest.approx(3.9)


@cases(
    ({"trace": Trace({0: RankTrace(0, 2)})}, "counted operations"),
    ({"cluster": plain(nodes=1, devices=1)}, "2 ranks do not fit on .* 1 x 1 devices; use"),
    ({"computing": "guessed"}, '"counted" or "measured"'),
    ({"computing": "measured"}, "no step of this trace was timed"),
    ({"steps": [3]}, "step 3 has no counted compute; choose one of \\[0\\]"),
)
def test_what_cannot_be_replayed_is_refused(change: dict[str, object], message: str) -> None:
    trace = trace_of(*([computed(1, 1), reduced] for reduced in both_reduce()))
    raises(message, replay, **{"trace": trace, "cluster": plain(), **change})
    trace.ranks[1].complete = False
    raises("record of rank 1 is cut off", replay, trace, plain())
    del trace.ranks[1]
    raises("rank 1 takes part in all_reduce 1 .* is missing", replay, trace, plain())


def train(strategy: str = "ddp", steps: int = 2, width: int = 60) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    wrapped, optimizer = RECIPES[strategy].build(model, Comm(), 1e-3)
    take_steps(optimizer, lambda _: wrapped(torch.ones(5, width)).sum(), steps)


def ring_of_messages() -> None:
    comm = Comm()
    model, x = nn.Linear(7, 7), torch.ones(3, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = comm.subgroup([0, 2])
    for _ in range(2):
        y = model(x)
        sending = comm.isend(y.detach(), (comm.rank + 1) % comm.size)
        comm.recv(x, (comm.rank - 1) % comm.size)
        y.sum().backward()
        sending.wait()
        if part is not None:
            part.all_reduce(model.weight.grad)
        optimizer.step()


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("naive-ddp", "messages"))]
)
def test_real_ranks_replayed_keep_every_law(worlds: Callable[..., World], name: str) -> None:
    world = worlds(3, backend="gloo")
    with record(detail_step=1) as trace:
        world.run(ring_of_messages) if name == "messages" else world.run(train, name)
    for where in (plain(devices=3), replace(cluster("v100-cloud"), nodes=3, devices_per_node=1)):
        replayed = replay(trace, where)
        assert broken_laws(replayed) == []
        counts = [len(rank.comms) for rank in trace.step(1).ranks.values()]
        assert [len(rank.comms) for rank in replayed.ranks.values()] == counts
        assert replayed == replay(trace, where)
        split = split_of(replayed)
        parts = split.compute_s + split.exposed_s + split.bubble_s
        assert split.step_s == pytest.approx(parts) and split.exposed_s > 0
        for one in replayed.ranks.values():
            sent = [x for x in one.comms if x.op != "recv"]
            sending_s = sum(x.ended_s - x.began_s for x in sent)
            latency_s = where.level_of((0, 1)).latency_s * len(one.comms)
            busy_s = length_s(communicating(replace(one, comms=sent)))
            assert sending_s - latency_s <= busy_s + 1e-12, "one thing at a time on a wire"
    again = replay(trace, where, computing="measured")
    assert broken_laws(again) == [] and again.steps() == [0]


@pytest.mark.parametrize("strategy", ["naive-ddp", "ddp"])
def test_one_rank_for_all_gives_the_times_of_all(strategy: str) -> None:
    dry = dry_run(train, strategy, ranks=8)
    for where in (replace(cluster("selene"), nodes=1), plain(nodes=4, devices=2, latency_s=1e-4)):
        few, every = replay(dry, where), replay(dry.expanded(), where)
        assert len(every.ranks) == 8 and every.complete and broken_laws(every) == []
        for one in every.ranks.values():
            assert (one.spans, one.steps) == (few.ranks[0].spans, few.ranks[0].steps)
        assert asdict(split_of(few)) == pytest.approx(asdict(split_of(every)))
        assert few.expanded() == every


def neighbours() -> None:
    comm = Comm()
    groups = [comm.subgroup(range(k, k + 3)) for k in range(0, comm.size, 3)]
    x = torch.ones(10**6)
    sending = comm.isend(x, (comm.rank + 1) % comm.size)
    comm.recv(torch.empty(10**6), (comm.rank - 1) % comm.size)
    sending.wait()
    next(one for one in groups if one is not None).all_reduce(x)
    torch.optim.SGD([nn.Parameter(x)], lr=0.1).step()


def test_the_slowest_of_the_groups_for_which_a_rank_stands_counts() -> None:
    """With 4 devices a node, ranks 3, 4, 5 are on two nodes, and so are 3 and 4."""
    where = replace(plain(nodes=3, devices=4), between=Level("between", 1e7, 1e-3, 4))
    alike = dry_run(neighbours, ranks=12, step=0)
    each = dry_run(neighbours, ranks=12, step=0, alike={rank: [rank] for rank in range(12)})
    expanded = alike.expanded()
    for rank in range(12):
        both = each.ranks[rank], expanded.ranks[rank]
        ends = [[(x.op, x.ranks, x.rank, x.peer) for x in of.comms] for of in both]
        assert ends[0] == ends[1]
    seconds = [step_s(replay(trace, where)) for trace in (alike, each, expanded)]
    assert seconds == pytest.approx([seconds[0]] * 3)
    quick = replace(where, nodes=1, devices_per_node=12)
    assert step_s(replay(alike, quick)) < seconds[0] / 10


def test_groups_lie_as_those_of_a_mesh() -> None:
    assert groups_like((0, 1), 6) == ((0, 1), (2, 3), (4, 5))
    assert groups_like((1, 3, 5), 6) == ((0, 2, 4), (1, 3, 5))
    assert groups_like((4, 5, 6, 7), 12)[2] == (8, 9, 10, 11)
    assert groups_like((0, 1, 4, 5), 8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert groups_like((0, 1, 3), 6) == ((0, 1, 3),), "no mesh has such groups"
    assert groups_like((1, 2), 6) == ((1, 2),), "nor these, beside (3, 4) and (5, 0)"


def test_more_of_the_bottleneck_resource_is_faster() -> None:
    dry = dry_run(lambda: train(width=600), ranks=8)

    node, nodes = plain(devices=8), plain(nodes=2, devices=4, latency_s=1e-3)
    slow = replace(nodes, between=replace(nodes.between, bytes_per_s=1e8))
    for base, part, better in [
        (node, "inside", {"bytes_per_s": 4e9}),
        (slow, "between", {"bytes_per_s": 1e9}),
        (slow, "between", {"latency_s": 1e-4}),
        (node, "device", {"memory_bytes_per_s": 1e11}),
        (node, "device", {"peak_flops": {"float32": 1e11}}),
    ]:
        faster = replace(base, **{part: replace(getattr(base, part), **better)})
        assert step_s(replay(dry, faster)) < step_s(replay(dry, base))
    dry = dry_run(lambda: train(width=2000), ranks=128)
    clusters = (cluster(name) for name in ("v100-cloud", "dgx-h100"))
    slow_s, fast_s = (split_of(replay(dry, there)).exposed_s for there in clusters)
    assert slow_s > 10 * fast_s > 0


def test_a_ring_costs_its_alpha_and_beta() -> None:
    inside = Level("inside", 10e9, 2e-6, 8, reached=0.5, start_s=1e-5)
    costs = Costs(replace(plain(devices=8), inside=inside))
    gather = costs.collective("all_gather", 8_000_000, tuple(range(8)))
    assert gather.seconds == pytest.approx(1e-5 + 7 * 2e-6 + 7 / 8 * 8e6 / 5e9)
    assert (gather.algorithm, gather.port) == ("ring", "inside")
    assert costs.collective("all_reduce", 8_000_000, (3,)).seconds == 0


def test_small_tensors_take_a_tree_and_long_ones_a_ring() -> None:
    costs, ranks = Costs(cluster("internet")), tuple(range(64))
    small, large = (costs.collective("all_reduce", n, ranks) for n in (100, 10**10))
    assert (small.algorithm, large.algorithm) == ("double_tree", "ring")
    assert small.seconds == pytest.approx(12 * 0.05, rel=0.01), "2 log2(64) steps of 50 ms"


def test_a_ring_over_whole_nodes_has_all_their_ports() -> None:
    """Megatron's data-parallel groups (one rank of each node) share the ports with seven others;
    a group of all ranks has them to itself, as far as the wires inside go."""
    costs = Costs(cluster("selene"))
    for ranks, expected_s in (
        (tuple(range(16)), 15 / 16 * 1e9 / (0.75 * 200e9)),
        ((0, 8), 1 / 2 * 1e9 / (0.75 * 25e9)),
    ):
        seconds = costs.collective("reduce_scatter", 10**9, ranks).seconds
        assert seconds == pytest.approx(expected_s, rel=0.05)


def test_steps_inside_a_node_and_between_nodes_have_their_own_latency() -> None:
    where = plain(nodes=2, devices=2)
    inside, between = replace(where.inside, latency_s=1.0), replace(where.between, latency_s=100.0)
    costs, ranks = Costs(replace(where, inside=inside, between=between)), (0, 1, 2, 3)
    # A ring passes both ranks of a node before it leaves it: every second of its 3 steps;
    # dissemination doubles its reach: of 2 steps, one leaves the node; all to all is one step.
    for name, seconds in (("all_gather", 151.5), ("barrier", 101), ("all_to_all", 100)):
        assert costs.collective(name, 0, ranks).seconds == seconds
    words = "no collective 'allreduce'; choose one of all_reduce"
    raises(words, costs.collective, "allreduce", 0, ranks)


def test_a_node_with_few_ranks_holds_up_the_others() -> None:
    """8 ranks on one node and 1 on another, whose port carries all that the ring carries."""
    where = cluster("dgx-h100")
    costs, lone = Costs(where), 0.75 * 50e9

    def seconds(ranks: int, op: str = "all_reduce") -> float:
        return costs.collective(op, 10**9, tuple(range(ranks))).seconds

    assert seconds(9) == pytest.approx(2 * 8 / 9 * 1e9 / lone, rel=0.02)
    assert seconds(8) < seconds(16) < seconds(12) < seconds(9)
    assert seconds(9, "all_to_all") == pytest.approx(8 / 9 * 1e9 / lone, rel=0.02)


def test_a_ring_goes_no_faster_than_the_wires_inside() -> None:
    where = plain(nodes=2, devices=4)
    slow = replace(where, inside=replace(where.inside, bytes_per_s=1e8))
    # All to all: to 3 of 7 others inside, at 0.1 GB/s; to 4 between, at 1 GB/s.
    for name, fast_s, slow_s in (("all_gather", 0.7, 7.0), ("all_to_all", 0.4, 3.0)):
        for at, seconds in ((where, fast_s), (slow, slow_s)):
            found = Costs(at).collective(name, 8 * 10**8, tuple(range(8)))
            assert found.seconds == pytest.approx(seconds)


def test_where_ranks_give_unequally_the_largest_part_decides() -> None:
    gives = [event("all_to_all", 1, 1.0, rank, wait_s=1.0) for rank in (0, 1)]
    gives[1].payload_bytes *= 2
    ranks = trace_of(*([one] for one in gives)).ranks
    for trace in (Trace(ranks), Trace(dict(reversed(ranks.items())))):
        assert [x.steps[0].ended_s for x in replay(trace, plain()).ranks.values()] == [1.0, 1.0]


def test_long_all_reduces_in_a_node_of_a100_take_what_was_measured() -> None:
    """vTrain (MIT licence), trace tables: 203 rows from 128 MiB on."""
    costs = Costs(cluster("selene"))
    with open(PUBLISHED / "a100_allreduce.csv") as file:
        for row in csv.DictReader(file):
            nbytes, ranks = int(row["bytes"]), tuple(range(int(row["gpus"])))
            if nbytes >= 1 << 27:
                found = costs.collective("all_reduce", nbytes, ranks)
                assert found.seconds == pytest.approx(int(row["time_ns"]) * 1e-9, rel=0.2), row


def test_an_operation_is_bound_by_what_it_needs_most() -> None:
    device = Device("one", {"float32": 1e12}, 1e9, 1e10, 1e-6, 0.5, 0.8, tile=100)
    costs = Costs(replace(plain(), device=device))

    def seconds(flops: int, nbytes: int, sides: tuple[int, ...] = ()) -> float:
        return costs.compute_s(Operation(0.0, 0, "mm", "float32", flops, nbytes, sides))

    assert seconds(10**9, 8) == pytest.approx(1e9 / 0.5e12)
    assert seconds(10**9, 8, (100, 100, 100)) == pytest.approx(8 * 1e9 / 0.5e12)
    assert seconds(8, 8 * 10**9) == pytest.approx(1.0)
    assert seconds(8, 8) == 1e-6
    raises("no rate for float64", costs.compute_s, Operation(0.0, 0, "mm", "float64", 8, 8))


def test_waiting_for_another_rank_is_bubble_whatever_else_is_on_the_wire() -> None:
    """Rank 0 sends to rank 2 for 1 s, and waits 3 s for a message that rank 1 sends at last."""
    sending = event("send", 1, 1.0, 0, size=3, peer=2)
    late = event("recv", 1, 2.0, 0, size=3, peer=1, wait_s=2.0)
    at_last = event("send", 1, 5.0, 1, size=3, peer=0)
    taken = event("recv", 1, 1.0, 2, size=3, peer=0, wait_s=1.0)
    trace = trace_of([sending, late], [computed(1, 2 * 10**9), at_last], [taken])
    one = split_of(Trace({0: replace(replay(trace, plain()).ranks[0], size=1)}))
    assert (one.step_s, one.exposed_s, one.bubble_s) == (3, 1, 2)


def train_4_microbatches() -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for _ in range(4):
            model(torch.ones(5, 500)).sum().backward()
        optimizer.step()


def test_a_pipeline_is_tiled_from_one_micro_batch() -> None:
    stage = dry_run(lambda: train("single", width=500), ranks=1)
    seconds = stage_seconds(stage, cluster("selene"))
    assert seconds["backward"] > seconds["forward"] > 0
    schedule = one_f_one_b(4, 6)
    trace = pipeline_trace(schedule, lambda _, action: seconds[action.phase])
    assert broken_laws(trace) == []
    # The bubble of 1F1B is (p-1)/(m+p-1) of the total: arXiv 2104.04473, section 2.2.1.
    assert split_of(trace).bubble_s / split_of(trace).step_s == pytest.approx(3 / 9)
    assert bubble(schedule, step_s(trace), lambda _, a: seconds[a.phase]) == pytest.approx(3 / 9)

    mean = stage_seconds(dry_run(train_4_microbatches, ranks=1), cluster("selene"))
    assert mean["forward"] == pytest.approx(seconds["forward"])
    assert seconds["backward"] <= mean["backward"] < 2 * seconds["backward"], "and sums of .grad"
    slow = pipeline_trace(schedule, lambda _, a: seconds[a.phase], 1e-3, message_bytes=100)
    assert broken_laws(slow) == [] and step_s(slow) > step_s(trace)
    assert [x.op for x in slow.ranks[3].comms[:2]] == ["recv", "send"]


@pytest.mark.slow
def test_the_largest_model_that_fits_is_the_largest() -> None:
    def record_width(width: int) -> Trace:
        return dry_run(lambda: train(width=width), ranks=4)

    widths = [10, 20, 30, 40, 50]
    peaks = [sum(peak_of(record_width(width)).values()) for width in widths]
    assert peaks == sorted(peaks)
    assert largest_that_fits(record_width, widths, peaks[2]) == 30
    assert largest_that_fits(record_width, widths, peaks[2] - 1) == 20
    assert largest_that_fits(record_width, widths, peaks[0] - 1) is None
    assert fits(record_width(50), peaks[4]) and not fits(record_width(50), peaks[4] - 1)
    least = RankTrace(1, 2, memory=[MemoryPoint(0.0, 0, (9, 0, 0, 0, 0, 0))])
    most = RankTrace(0, 2, memory=[MemoryPoint(0.0, 0, (1, 9, 0, 0, 0, 0))])
    assert peak_of(Trace({0: most, 1: least}))["gradients"] == 9
    raises("no memory", peak_of, Trace({0: RankTrace(0, 1)}))


def test_model_flops_utilization_is_counted_operations_over_possible_ones() -> None:
    dry = dry_run(lambda: train("single", width=4000), ranks=1)
    where = cluster("selene")
    split = split_of(replay(dry, where))
    product = 2 * 5 * 4000 * 4000  # of 5 rows; the first layer needs no gradient of its input
    assert split.flops == 2 * 3 * product - product
    peak = where.device.peak_flops_of("float32")
    assert split.mfu(peak) == pytest.approx(split.flops / split.step_s / peak)
    assert "computing 100%" in str(split)
    uncounted = split_of(Trace({0: RankTrace(0, 1, steps=[Step(0, 0.0, 1.0)])}))
    raises("no FLOPs were counted", uncounted.mfu, 1e12)


ROWS, DEPTH, WIDTH, LENGTH = 2, 2, 3072, 2048
X_BYTES = LENGTH * WIDTH * 2  # of a row of x, in bfloat16


def train_in_tensor_parallel(sequence: bool) -> None:
    comm = Comm()
    model = GPT(8192, WIDTH, DEPTH, heads=24, context=LENGTH).bfloat16()
    tensor_parallel(model, comm, sequence=sequence, gather_logits=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    take_steps(optimizer, lambda _: vocab_parallel_cross_entropy(model(tokens), tokens, comm))


@pytest.fixture(scope="module", params=[False, True], ids=["tensor", "sequence"])
def tensor_step(request: pytest.FixtureRequest) -> Trace:
    return dry_run(train_in_tensor_parallel, request.param, ranks=8)


def test_the_activations_of_a_tensor_parallel_step_travel(tensor_step: Trace) -> None:
    """In units of x, of which a gather or a scatter sends one and an all-reduce two: a layer sends
    8, or 10 where parts of x are kept and gathered again; embedding and head 4, or 5."""
    large = [event for event in tensor_step.ranks[0].comms if event.payload_bytes == ROWS * X_BYTES]
    ops, units = {"all_reduce"}, 8 * DEPTH + 4
    if large[0].op == "reduce_scatter":
        ops, units = {"all_gather", "reduce_scatter"}, 10 * DEPTH + 5
    assert {event.op for event in large} == ops
    unit = 7 / 8 * ROWS * X_BYTES
    assert sum(event.bus_bytes for event in large) == units * unit


def test_a_tensor_parallel_step_on_more_nodes_waits_for_messages(tensor_step: Trace) -> None:
    shares = []
    for nodes in (1, 2, 4, 8):
        where = replace(cluster("selene"), nodes=nodes, devices_per_node=8 // nodes)
        split = split_of(replay(tensor_step, where))
        shares.append(split.exposed_s / split.step_s)
    assert shares == sorted(shares)
    assert shares[0] < 0.4 and shares[-1] > 0.7 and shares[-1] > 2 * shares[0]
