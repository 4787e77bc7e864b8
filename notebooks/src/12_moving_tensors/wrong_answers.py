import torch

from answers import right, wrong

# ---- bring_half(bus, x, bus_rate, here_rate, there_rate)


@wrong("12.bring_half", "you cast before the copy")
def always_casts_before(bus, x, bus_rate, here_rate, there_rate):
    there = torch.empty_like(x.half())
    bus.copy(there, x.half()).wait()
    return there


@wrong("12.bring_half", "you cast after the copy")
def always_casts_after(bus, x, bus_rate, here_rate, there_rate):
    there = torch.empty_like(x)
    bus.copy(there, x).wait()
    return there.half()


@wrong("12.bring_half", "you cast after the copy")
def looks_at_the_bus_alone(bus, x, bus_rate, here_rate, there_rate):
    if bus_rate < here_rate / 3:
        x = x.half()
    there = torch.empty_like(x)
    bus.copy(there, x).wait()
    return there.half()


@wrong("12.bring_half", "bus.copy(...) only starts the copy")
def does_not_wait(bus, x, bus_rate, here_rate, there_rate):
    there = torch.zeros_like(x.half())
    bus.copy(there, x.half())
    return there


@wrong("12.bring_half", "0 bytes went over the bus")
def leaves_them_here(bus, x, bus_rate, here_rate, there_rate):
    return x.half()


@wrong("12.bring_half", "fp16 is wanted")
def leaves_them_in_fp32(bus, x, bus_rate, here_rate, there_rate):
    there = torch.empty_like(x)
    bus.copy(there, x).wait()
    return there


# ---- prefetched(load, n, ahead)


@wrong("12.prefetched", "1 loads have begun when block 0 is used")
def loads_when_needed(load, n, ahead):
    for k in range(n):
        yield load(k).wait()


@wrong("12.prefetched", "blocks are loaded or under way at a time")
def loads_everything_first(load, n, ahead):
    coming = [load(k) for k in range(n)]
    for one in coming:
        yield one.wait()


@wrong("12.prefetched", "3 blocks are loaded or under way at a time")
def loads_before_a_block_is_given_back(load, n, ahead):
    coming = [load(k) for k in range(min(ahead + 1, n))]
    for k in range(n):
        if k + ahead + 1 < n:
            coming.append(load(k + ahead + 1))
        yield coming.pop(0).wait()


@wrong("12.prefetched", "loads have begun when block")
def forgets_those_after_the_first(load, n, ahead):
    coming = {k: load(k) for k in range(min(ahead + 1, n))}
    for k in range(n):
        if k not in coming:
            coming[k] = load(k)
        yield coming.pop(k).wait()


@wrong("12.prefetched", "you yield")
def yields_the_arrivals(load, n, ahead):
    for k in range(n):
        yield load(k)


@wrong("12.prefetched", "you yield")
def drops_the_last(load, n, ahead):
    coming = [load(k) for k in range(min(ahead, n))]
    for k in range(ahead, n):
        coming.append(load(k))
        yield coming.pop(0).wait()


@right("12.prefetched")
def loads_when_the_caller_comes_back(load, n, ahead):
    coming = [load(k) for k in range(min(ahead + 1, n))]
    for k in range(n):
        yield coming[k].wait()
        if k + ahead + 1 < n:
            coming.append(load(k + ahead + 1))


# ---- double_buffered(bus, blocks, compute, x)


def _run(bus, blocks, compute, x, buffers=2, ahead=1, wait=True, size=None):
    size = size or max(block.numel() for block in blocks)
    memory = [torch.empty(size) for _ in range(buffers)]
    arrivals, parts = [], []

    def load(k):
        if k < len(blocks):
            parts.append(memory[k % buffers][: blocks[k].numel()])
            arrivals.append(bus.copy(parts[k], blocks[k]))

    for k in range(ahead):
        load(k)
    for k in range(len(blocks)):
        load(k + ahead)
        if wait:
            arrivals[k].wait()
        x = compute(k, parts[k], x)
    return x


@wrong("12.double_buffered", "the load of block 1 is not under way")
def one_after_the_other(bus, blocks, compute, x):
    return _run(bus, blocks, compute, x, ahead=0)


@wrong("12.double_buffered", "weights that are not its own, or change meanwhile")
def has_one_buffer(bus, blocks, compute, x):
    return _run(bus, blocks, compute, x, buffers=1)


@wrong("12.double_buffered", "block 0 computes before its load was waited for")
def does_not_wait_for_a_load(bus, blocks, compute, x):
    return _run(bus, blocks, compute, x, wait=False)


@wrong("12.double_buffered", "in 3 buffers")
def has_three_buffers(bus, blocks, compute, x):
    return _run(bus, blocks, compute, x, buffers=3)


@wrong("12.double_buffered", "you hold")
def makes_a_buffer_for_each_block(bus, blocks, compute, x):
    parts = [torch.empty_like(block) for block in blocks]
    arrivals = [bus.copy(part, block) for part, block in zip(parts, blocks)]
    for k, part in enumerate(parts):
        arrivals[k].wait()
        x = compute(k, part, x)
    return x


@wrong("12.double_buffered", "your function raised")
def has_buffers_of_the_first_block(bus, blocks, compute, x):
    return _run(bus, blocks, compute, x, size=blocks[0].numel())


@wrong("12.double_buffered", "you returned None")
def returns_nothing(bus, blocks, compute, x):
    _run(bus, blocks, compute, x)


# ---- plan(model)


@wrong("12.plan", "less than")
def keeps_nothing(model):
    return set(), 1


@wrong("12.plan", "your plan holds")
def keeps_everything(model):
    return set(range(len(model.nbytes))), 1


@wrong("12.plan", "your plan holds")
def forgets_the_buffers(model):
    keep, held = set(), 0
    for k, nbytes in enumerate(model.nbytes):
        if held + nbytes <= model.cap_bytes:
            keep, held = keep | {k}, held + nbytes
    return keep, 1


@wrong("12.plan", "ahead is 0")
def loads_nothing_ahead(model):
    return {0}, 0


@wrong("12.plan", "keep has 3.0")
def numbers_its_blocks_in_floats(model):
    return {3.0}, 1


@wrong("12.plan", "keep has 99")
def keeps_a_block_that_is_not_there(model):
    return {0, 99}, 1


@wrong("12.plan", "plan returned {0, 1}")
def forgets_how_many_ahead(model):
    return {0, 1}
