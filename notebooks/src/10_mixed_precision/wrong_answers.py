import math

import torch

from answers import Solution, right, wrong
from labkit.precision.op_policy import CUDA

from .scales import FP16_MAX, TorchGradScaler

# ---- runs_in(op, types, low)

Solution("10.runs_in").slips("""
matmuls_in_fp32: accumulates in fp32 anyway
    "conv2d"):
            return low ->
        "conv2d"):
                return torch.float32
as_on_a_cpu: softmax with bfloat16 inputs, you return None (no cast)
    "softmax", "layer_norm", "exp", "sum", "cross_entropy_loss" -> "cross_entropy_loss",
sums_in_low: How large can the result become
    "conv2d") -> "conv2d", "sum")
everything_in_low: gelu with float32 inputs, you return bfloat16
    return None -> return low
never_promotes: Which dtype loses no precision?
    torch.float32 if torch.float32 in types else low -> low
""")


@right("10.runs_in")
def only_real_casts(op, types, low):
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
one_step_late: which one changes, and when?
    good + 1 == interval -> good == interval
counts_on_after_growing: after a good step
    scale * 2, 0 -> scale * 2, good + 1
""")

# ---- unscale(comm, pieces, scale)

Solution("10.unscale").slips("""
by_the_mean
    op="max" -> op="mean"
decides_alone: does not skip the step
    comm.all_reduce(bad, op="max") -> pass
forgets_nan: does not skip the step
    all(bool(torch.isfinite(x).all()) for x in pieces) ->
        not any(bool(x.isinf().any()) for x in pieces)
forgets_minus_inf: does not skip the step
    all(bool(torch.isfinite(x).all()) for x in pieces) ->
        max([float(x.max()) for x in pieces], default=0.0) < math.inf
divides_in_fp16: Cast first, then divide
    x.float() / scale -> x / scale
ranks_without_gradients_leave: rank
    finite = all( ->
        if not pieces:
            return []
        finite = all(
sends_1000_elements: expected: one element
    torch.tensor(0.0 if finite else 1.0) -> torch.full((1000,), 0.0 if finite else 1.0)
    None if bad else -> None if bad[0] else
a_number: expected: a list of tensors, one per gradient
    [x.float() / scale for x in pieces] -> 1 / scale
always_skips: skips the step
    0.0 if finite else 1.0 -> 1.0
""")

# ---- master_step(parameters, masters, lr)

Solution("10.master_step").slips("""
masters_from_the_weights: a master is a tensor that differs
    master -= lr * p.grad.float() -> master.copy_(p.float() - lr * p.grad.float())
multiplies_in_bf16: In which dtype is lr · gradient computed?
    p.grad.float() -> p.grad
updates_masters_in_bf16: In which dtype is lr · gradient computed?
    master -= lr * p.grad.float() -> master.copy_((master - lr * p.grad.float()).bfloat16())
never_copies_back: Which line copies the masters back to the weights?
    p.copy_(master) -> pass
makes_new_masters: update the tensors in `masters` in place
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
    """fp16's largest number, divided by `room` and by the largest gradient of `steps` steps."""

    def __init__(self, steps: int, room: float) -> None:
        self.scale, self.steps, self.room = 2.0**16, steps, room
        self.seen: list[float] = []

    def after_step(self, amax: float) -> None:
        if math.isfinite(amax):
            self.seen = [*self.seen, amax][-self.steps :]
            self.scale = FP16_MAX / (max(self.seen) * self.room)


@wrong("10.Chooser", "How much may it grow in one step?")
class LikeTorch(TorchGradScaler):
    pass
