import math

import torch

from answers import Solution, right, wrong
from labkit.precision.op_policy import CUDA

from .scales import MOST, Torchs

# ---- runs_in(op, types, low)

Solution("10.runs_in").slips("""
products_in_fp32: its sums are in fp32 anyway
    "conv2d"):
            return low ->
        "conv2d"):
                return torch.float32
as_on_a_cpu: softmax, whose inputs are bfloat16: as they come
    "softmax", "layer_norm", "exp", "sum", "cross_entropy_loss" -> "cross_entropy_loss",
sums_in_low: How large can its result become
    "conv2d") -> "conv2d", "sum")
everything_in_low: gelu, whose inputs are float32: bfloat16
    return None -> return low
never_promotes: Which loses nothing?
    torch.float32 if torch.float32 in types else low -> low
""")


@right("10.runs_in")
def only_what_changes(op, types, low):
    fp32 = torch.float32
    widest = fp32 if fp32 in types else low
    found = {"low": low, "fp32": fp32, "promote": widest}.get(CUDA.of(op))
    return None if set(types) == {found} else found


# ---- update(scale, good, found_inf, interval)

Solution("10.update").slips("""
never_backs_off: after a step with an inf
    scale / 2 -> scale
keeps_counting: after a step with an inf
    scale / 2, 0 -> scale / 2, good
one_step_late: which of them, and when?
    good + 1 == interval -> good == interval
counts_on_after_growing: after a step that was good
    scale * 2, 0 -> scale * 2, good + 1
""")

# ---- unscale(comm, pieces, scale)

Solution("10.unscale").slips("""
by_the_mean
    op="max" -> op="mean"
decides_alone: would step
    comm.all_reduce(bad, op="max") -> pass
forgets_nan: would step
    all(bool(torch.isfinite(x).all()) for x in pieces) ->
        not any(bool(x.isinf().any()) for x in pieces)
forgets_minus_inf: would step
    all(bool(torch.isfinite(x).all()) for x in pieces) ->
        max([float(x.max()) for x in pieces], default=0.0) < math.inf
divides_in_fp16: First the type, then the division
    x.float() / scale -> x / scale
leaves_out_ranks_without_any: rank
    finite = all( ->
        if not pieces:
            return []
        finite = all(
sends_a_lot: expected: one number
    torch.tensor(0.0 if finite else 1.0) -> torch.full((1000,), 0.0 if finite else 1.0)
    None if bad else -> None if bad[0] else
a_number: a list of tensors, one for each piece
    [x.float() / scale for x in pieces] -> 1 / scale
always_skips: skips the step
    0.0 if finite else 1.0 -> 1.0
""")

# ---- master_step(parameters, masters, lr)

Solution("10.master_step").slips("""
masters_from_the_weights: a master is a tensor that differs
    master -= lr * p.grad.float() -> master.copy_(p.float() - lr * p.grad.float())
multiplies_in_bf16: In which type is lr · gradient computed?
    p.grad.float() -> p.grad
updates_masters_in_bf16: In which type is lr · gradient computed?
    master -= lr * p.grad.float() -> master.copy_((master - lr * p.grad.float()).bfloat16())
never_copies_back: Who gives the model what the masters have?
    p.copy_(master) -> pass
makes_new_ones: change the tensors in `masters` in place
    master -= lr -> master = master - lr
""")

# ---- Chooser()

Solution("10.Chooser").slips("""
AlwaysTheFirst: are lost
    self.scale = 65504 / (2 * amax) -> pass
NoRoom: are lost
    (2 * amax) -> amax
TrustsInf: a finite number above 0
    if math.isfinite(amax): -> if True:
""")


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


@wrong("10.Chooser", "How far may it jump?")
class LikeTorch(Torchs):
    pass
