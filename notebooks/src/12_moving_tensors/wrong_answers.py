from answers import Solution, right, wrong

# ---- bring_half(bus, x, bus_rate, here_rate, there_rate)

bring_half = Solution("12.bring_half")
bring_half.wrong(
    "always_casts_before", "you cast before the copy", {"if before < after:": "if True:"}
)
bring_half.wrong(
    "always_casts_after", "you cast after the copy", {"if before < after:": "if False:"}
)
bring_half.wrong(
    "looks_at_the_bus_alone",
    "you cast after the copy",
    {"before < after": "bus_rate < here_rate / 3"},
)
bring_half.wrong(
    "does_not_wait",
    "bus.copy(...) only starts the copy",
    {
        "torch.empty_like(x)": "torch.zeros_like(x)",
        ".wait()": "",
    },
)
bring_half.returns("leaves_them_here", "0 bytes went over the bus", "x.half()")
bring_half.wrong(
    "leaves_them_in_fp32",
    "fp16 is wanted",
    {
        "x = x.half()": "pass",
        "return there.half()": "return there",
    },
)

# ---- prefetched(load, n, ahead)

prefetched = Solution("12.prefetched")
prefetched.wrong("yields_the_arrivals", "you yield", {".wait()": ""})
prefetched.wrong(
    "drops_the_last", "you yield", {"for k in range(n):": "for k in range(n - ahead):"}
)


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


@right("12.prefetched")
def loads_when_the_caller_comes_back(load, n, ahead):
    coming = [load(k) for k in range(min(ahead + 1, n))]
    for k in range(n):
        yield coming[k].wait()
        if k + ahead + 1 < n:
            coming.append(load(k + ahead + 1))


# ---- double_buffered(bus, blocks, compute, x)

double_buffered = Solution("12.double_buffered")
double_buffered.wrong(
    "one_after_the_other",
    "the load of block 1 is not under way",
    {
        """\
        if k + 1 < len(blocks):
            part, coming = load(k + 1)
        arrival.wait()
        x = compute(k, mine, x)
""": """\
        arrival.wait()
        x = compute(k, mine, x)
        if k + 1 < len(blocks):
            part, coming = load(k + 1)
"""
    },
)
double_buffered.wrong(
    "has_one_buffer",
    "weights that are not its own, or change meanwhile",
    {"buffers[k % 2]": "buffers[0]"},
)
double_buffered.wrong(
    "does_not_wait_for_a_load",
    "block 0 computes before its load was waited for",
    {"arrival.wait()": "pass"},
)
double_buffered.wrong(
    "has_three_buffers",
    "in 3 buffers",
    {
        "[torch.empty(largest), torch.empty(largest)]": "[torch.empty(largest) for _ in range(3)]",
        "k % 2": "k % 3",
    },
)
double_buffered.wrong(
    "makes_a_buffer_for_each_block",
    "you hold",
    {
        "[torch.empty(largest), torch.empty(largest)]": """
            [torch.empty_like(block) for block in blocks]
        """,
        "k % 2": "k",
    },
)
double_buffered.wrong(
    "has_buffers_of_the_first_block",
    "your function raised",
    {"max(block.numel() for block in blocks)": "blocks[0].numel()"},
)
double_buffered.wrong("returns_nothing", "you returned None", {"return x": "pass"})

# ---- plan(model)

plan = Solution("12.plan")
plan.returns("keeps_nothing", "less than", "(set(), 1)")
plan.returns("keeps_everything", "your plan holds", "(set(range(len(model.nbytes))), 1)")
plan.wrong(
    "forgets_the_buffers",
    "your plan holds",
    {"model.held_bytes(one, ahead)": "sum(model.nbytes[k] for k in one)"},
)
plan.returns("loads_nothing_ahead", "ahead is 0", "({0}, 0)")
plan.returns("numbers_its_blocks_in_floats", "keep has 3.0", "({3.0}, 1)")
plan.returns("keeps_a_block_that_is_not_there", "keep has 99", "({0, 99}, 1)")
plan.returns("forgets_how_many_ahead", "plan returned {0, 1}", "{0, 1}")
