import math

import torch

from answers import right, wrong

from .scales import MOST, Torchs

FP32 = torch.float32
PRODUCTS = ("linear", "matmul", "conv2d")
EXACT = ("softmax", "layer_norm", "exp", "sum", "cross_entropy_loss")

# ---- runs_in(op, types, low)


def type_of(op, types, low, products=PRODUCTS, exact=EXACT):
    if op in products:
        return low
    if op in exact:
        return FP32
    return {"addcmul": FP32 if FP32 in types else low}.get(op)


@right("10.runs_in")
def only_what_changes(op, types, low):
    found = type_of(op, types, low)
    return None if set(types) == {found} else found


@wrong("10.runs_in", "its sums are in fp32 anyway")
def products_in_fp32(op, types, low):
    return type_of(op, types, low, (), EXACT + PRODUCTS)


@wrong("10.runs_in", "softmax, whose inputs are bfloat16: as they come")
def as_on_a_cpu(op, types, low):
    return type_of(op, types, low, exact=("cross_entropy_loss",))


@wrong("10.runs_in", "How large can its result become")
def sums_in_low(op, types, low):
    return type_of(op, types, low, (*PRODUCTS, "sum"))


@wrong("10.runs_in", "gelu, whose inputs are float32: bfloat16")
def everything_in_low(op, types, low):
    return type_of(op, types, low) or low


@wrong("10.runs_in", "Which loses nothing?")
def never_promotes(op, types, low):
    return low if op == "addcmul" else type_of(op, types, low)


# ---- update(scale, good, found_inf, interval)


@wrong("10.update", "after a step with an inf")
def never_backs_off(scale, good, found_inf, interval):
    if found_inf:
        return scale, 0
    return (scale * 2, 0) if good + 1 == interval else (scale, good + 1)


@wrong("10.update", "after a step with an inf")
def keeps_counting(scale, good, found_inf, interval):
    if found_inf:
        return scale / 2, good
    return (scale * 2, 0) if good + 1 == interval else (scale, good + 1)


@wrong("10.update", "which of them, and when?")
def one_step_late(scale, good, found_inf, interval):
    if found_inf:
        return scale / 2, 0
    return (scale * 2, 0) if good == interval else (scale, good + 1)


@wrong("10.update", "after a step that was good")
def counts_on_after_growing(scale, good, found_inf, interval):
    if found_inf:
        return scale / 2, 0
    return scale * (2 if good + 1 == interval else 1), good + 1


# ---- unscale(comm, pieces, scale)


def finite(pieces):
    return all(bool(torch.isfinite(x).all()) for x in pieces)


def agreed(comm, bad):
    number = torch.tensor(float(bad))
    comm.all_reduce(number, op="max")
    return bool(number)


@right("10.unscale")
def by_the_mean(comm, pieces, scale):
    number = torch.tensor(float(finite(pieces)))
    comm.all_reduce(number, op="mean")
    return [x.float() / scale for x in pieces] if number == 1 else None


@wrong("10.unscale", "would step")
def decides_alone(comm, pieces, scale):
    return [x.float() / scale for x in pieces] if finite(pieces) else None


@wrong("10.unscale", "would step")
def forgets_nan(comm, pieces, scale):
    bad = agreed(comm, any(bool(x.isinf().any()) for x in pieces))
    return None if bad else [x.float() / scale for x in pieces]


@wrong("10.unscale", "would step")
def forgets_minus_inf(comm, pieces, scale):
    largest = max([float(x.max()) for x in pieces], default=0.0)
    bad = agreed(comm, not largest < math.inf)
    return None if bad else [x.float() / scale for x in pieces]


@wrong("10.unscale", "First the type, then the division")
def divides_in_fp16(comm, pieces, scale):
    return None if agreed(comm, not finite(pieces)) else [x / scale for x in pieces]


@wrong("10.unscale", "rank")
def leaves_out_ranks_without_any(comm, pieces, scale):
    if not pieces:
        return []
    return None if agreed(comm, not finite(pieces)) else [x.float() / scale for x in pieces]


@wrong("10.unscale", "expected: one number")
def sends_a_lot(comm, pieces, scale):
    numbers = torch.full((1000,), float(not finite(pieces)))
    comm.all_reduce(numbers, op="max")
    return None if numbers[0] else [x.float() / scale for x in pieces]


@wrong("10.unscale", "a list of tensors, one for each piece")
def a_number(comm, pieces, scale):
    return None if agreed(comm, not finite(pieces)) else 1 / scale


@wrong("10.unscale", "skips the step")
def always_skips(comm, pieces, scale):
    agreed(comm, True)


# ---- master_step(parameters, masters, lr)


@wrong("10.master_step", "a master is a tensor that differs")
@torch.no_grad()
def masters_from_the_weights(parameters, masters, lr):
    for p, master in zip(parameters, masters):
        master.copy_(p.float() - lr * p.grad.float())
        p.copy_(master)


@wrong("10.master_step", "In which type is lr · gradient computed?")
@torch.no_grad()
def multiplies_in_bf16(parameters, masters, lr):
    for p, master in zip(parameters, masters):
        master -= lr * p.grad
        p.copy_(master)


@wrong("10.master_step", "In which type is lr · gradient computed?")
@torch.no_grad()
def updates_masters_in_bf16(parameters, masters, lr):
    for p, master in zip(parameters, masters):
        master.copy_((master - lr * p.grad.float()).bfloat16())
        p.copy_(master)


@wrong("10.master_step", "Who gives the model what the masters have?")
@torch.no_grad()
def never_copies_back(parameters, masters, lr):
    for p, master in zip(parameters, masters):
        master -= lr * p.grad.float()


@wrong("10.master_step", "change the tensors in `masters` in place")
@torch.no_grad()
def makes_new_ones(parameters, masters, lr):
    for p, master in zip(parameters, masters):
        p.copy_(master - lr * p.grad.float())


# ---- Chooser()


@right("10.Chooser")
def with_some_room():
    return Following(4, 4.0)


class Following:
    """The largest number that fp16 has, over the largest gradient of `steps` steps and `room`."""

    def __init__(self, steps: int, room: float) -> None:
        self.scale, self.steps, self.room = 2.0**16, steps, room
        self.seen: list[float] = []

    def after_step(self, amax: float) -> None:
        if math.isfinite(amax):
            self.seen = [*self.seen, amax][-self.steps :]
            self.scale = MOST / (max(self.seen) * self.room)


@wrong("10.Chooser", "are lost")
class AlwaysTheFirst:
    scale = 2.0**16

    def after_step(self, amax):
        pass


@wrong("10.Chooser", "How far may it jump?")
class LikeTorch(Torchs):
    pass


@wrong("10.Chooser", "are lost")
class NoRoom:
    scale = 2.0**16

    def after_step(self, amax):
        if math.isfinite(amax):
            self.scale = MOST / amax


@wrong("10.Chooser", "a finite number above 0")
class TrustsInf:
    scale = 2.0**16

    def after_step(self, amax):
        self.scale = MOST / amax / 2
