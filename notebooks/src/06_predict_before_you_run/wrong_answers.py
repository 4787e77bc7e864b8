import torch

from answers import right, wrong

# ---- ring_s(nbytes, n, latency_s, bytes_per_s)


@wrong("06.ring_s", "Each of the messages, one after the other, has its own latency")
def one_latency(nbytes, n, latency_s, bytes_per_s):
    return latency_s + 2 * (n - 1) / n * nbytes / bytes_per_s


@wrong("06.ring_s", "How large is the chunk that is sent in one step?")
def sends_all_of_it_each_time(nbytes, n, latency_s, bytes_per_s):
    return 2 * (n - 1) * (latency_s + nbytes / bytes_per_s)


@wrong("06.ring_s", "How many messages follow each other, and how long is each?")
def half_a_ring(nbytes, n, latency_s, bytes_per_s):
    return (n - 1) * (latency_s + nbytes / n / bytes_per_s)


@wrong("06.ring_s", "4,000,000 bytes over 1 rank take")
def forgets_that_one_is_alone(nbytes, n, latency_s, bytes_per_s):
    return max(2 * (n - 1), 1) * (latency_s + nbytes / n / bytes_per_s)


@wrong("06.ring_s", "ring_s returned None")
def returns_nothing(nbytes, n, latency_s, bytes_per_s):
    pass


@right("06.ring_s")
def in_two_halves(nbytes, n, latency_s, bytes_per_s):
    return sum(latency_s + nbytes / n / bytes_per_s for _ in range(2 * (n - 1)))


# ---- product_s(m, n, k, element_bytes, flops_per_s, bytes_per_s)


@wrong("06.product_s", "Both happen at the same time")
def one_after_the_other(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    moved_bytes = element_bytes * (m * k + k * n + m * n)
    return 2 * m * n * k / flops_per_s + moved_bytes / bytes_per_s


@wrong("06.product_s", "the slower of the two decides")
def arithmetic_alone(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    return 2 * m * n * k / flops_per_s


@wrong("06.product_s", "How many multiplications and additions")
def multiplications_alone(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    moved_bytes = element_bytes * (m * k + k * n + m * n)
    return max(m * n * k / flops_per_s, moved_bytes / bytes_per_s)


@wrong("06.product_s", "Which bytes are read, which are written?")
def forgets_the_result(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    moved_bytes = element_bytes * (m * k + k * n)
    return max(2 * m * n * k / flops_per_s, moved_bytes / bytes_per_s)


@wrong("06.product_s", "the slower of the two decides")
def the_faster_one(m, n, k, element_bytes, flops_per_s, bytes_per_s):
    moved_bytes = element_bytes * (m * k + k * n + m * n)
    return min(2 * m * n * k / flops_per_s, moved_bytes / bytes_per_s)


# ---- volumes(width, depth, tokens, n, element_bytes)


def volumes(width, depth, tokens, n, element_bytes, *, grads=1.0, calls=4, messages=2):
    around, x_bytes = 2 * (n - 1) / n, tokens * width * element_bytes
    data = grads * around * 12 * depth * width**2 * element_bytes
    return data, calls * around * depth * x_bytes, messages * x_bytes


@wrong("06.volumes", "tensor:")
def forgets_the_backward(width, depth, tokens, n, element_bytes):
    return volumes(width, depth, tokens, n, element_bytes, calls=2)


@wrong("06.volumes", "data:")
def half_an_all_reduce(width, depth, tokens, n, element_bytes):
    return volumes(width, depth, tokens, n, element_bytes, grads=0.5)


@wrong("06.volumes", "pipeline:")
def sends_to_the_right_only(width, depth, tokens, n, element_bytes):
    return volumes(width, depth, tokens, n, element_bytes, messages=1)


@wrong("06.volumes", "data:")
def always_four_bytes(width, depth, tokens, n, element_bytes):
    data, tensor, pipeline = volumes(width, depth, tokens, n, 4)
    return data, tensor * element_bytes / 4, pipeline * element_bytes / 4


@wrong("06.volumes", "expected: three numbers: (data, tensor, pipeline)")
def one_number(width, depth, tokens, n, element_bytes):
    return sum(volumes(width, depth, tokens, n, element_bytes))


# ---- done_s(program)


@wrong("06.done_s", "the rank goes on at once")
def everything_in_a_row(program):
    return sum(how for what, how in program if what != "wait")


@wrong("06.done_s", "What does a wait wait for?")
def never_waits(program):
    return sum(how for what, how in program if what == "compute")


@wrong("06.done_s", "Its rank must have sent it, and the wire must be free")
def a_wire_for_each(program):
    now_s, ends = 0.0, []
    for what, how in program:
        if what == "compute":
            now_s += how
        elif what == "send":
            ends.append(now_s + how)
        else:
            now_s = max(now_s, ends[how])
    return now_s


@wrong("06.done_s", "A wait for what is over takes no time")
def time_goes_back(program):
    now_s, ends = 0.0, []
    for what, how in program:
        if what == "compute":
            now_s += how
        elif what == "send":
            ends.append(max([now_s, *ends]) + how)
        else:
            now_s = ends[how]
    return now_s


@wrong("06.done_s", "Its rank must have sent it, and the wire must be free")
def the_wire_never_rests(program):
    now_s, ends = 0.0, []
    for what, how in program:
        if what == "compute":
            now_s += how
        elif what == "send":
            ends.append((ends[-1] if ends else now_s) + how)
        else:
            now_s = max(now_s, ends[how])
    return now_s


# ---- step_in_closed_form_s(facts)


@wrong("06.step_in_closed_form_s", "more than that of perfect overlap")
def nothing_is_hidden(facts):
    return facts.forward_s + facts.backward_s + sum(facts.bucket_s) + facts.optimizer_s


@wrong("06.step_in_closed_form_s", "What is left out?")
def forgets_the_optimizer(facts):
    return facts.forward_s + max(facts.backward_s, sum(facts.bucket_s))


@wrong("06.step_in_closed_form_s", "What is counted twice?")
def counts_buckets_twice(facts):
    computing_s = facts.forward_s + facts.backward_s + facts.optimizer_s
    return computing_s + 2 * sum(facts.bucket_s)


@wrong("06.step_in_closed_form_s", "step_in_closed_form_s returned tensor(")
def a_tensor(facts):
    return torch.tensor(facts.forward_s)


@right("06.step_in_closed_form_s")
def equal_buckets(facts):
    fill_s = facts.backward_s / len(facts.bucket_s)
    send_s = sum(facts.bucket_s) / len(facts.bucket_s)
    both_s = max(facts.backward_s + send_s, fill_s + sum(facts.bucket_s))
    return facts.forward_s + both_s + facts.optimizer_s


@right("06.step_in_closed_form_s")
def the_best_known(facts):
    """The head's products are larger than the layers', and run faster: 0.8 is by eye."""
    *early, _ = facts.bucket_bytes
    head, filled_bytes, free_s = 0.8 * facts.head_part, 0, 0.0
    for nbytes, seconds in zip(early, facts.bucket_s):
        filled_bytes += nbytes
        ready_s = facts.backward_s * (head + (1 - head) * filled_bytes / sum(early))
        free_s = max(free_s, ready_s) + seconds
    return facts.forward_s + max(free_s, facts.backward_s) + facts.bucket_s[-1] + facts.optimizer_s
