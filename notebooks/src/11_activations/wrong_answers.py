from itertools import product

import torch

from answers import Solution, right, wrong
from labkit.memory.chooser import plan_of

from .scenarios import u_shaped_costs

# ---- Again: forward(ctx, layer, *inputs), backward(ctx, *gradients)

Solution("11.Again").slips("""
# One weighted sum of all outputs gives the same gradients.
OneSum
    torch.autograd.backward(outputs, gradients) ->
        with torch.enable_grad():
            sum((y * dy).sum() for y, dy in zip(outputs, gradients)).backward()
OfOneInput: takes 3 positional arguments but 4 were given
    (ctx, layer, *inputs) -> (ctx, layer, x)
    ctx.save_for_backward(*inputs) -> ctx.save_for_backward(x)
    return layer(*inputs) -> return layer(x)
TheFirstOutputAlone: is a tensor that differs
    backward(outputs, gradients) -> backward(outputs[0], gradients[0])
NewMasks: Which mask does dropout draw in the second forward?
    torch.set_rng_state(ctx.rng) -> pass
NeverRestoresTheGenerator: the next random number is not
    torch.random.fork_rng(devices=[]), ->
OnlyTheInput: the weights have no gradient
    torch.autograd.backward(outputs, gradients) ->
        found = torch.autograd.grad(outputs, inputs, gradients)
    *(x.grad for x in inputs) -> *found
Twice: It is twice the correct gradient
    outputs = ctx.layer(*inputs) ->
        others = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.backward(ctx.layer(*others), gradients)
        torch.set_rng_state(ctx.rng)
        outputs = ctx.layer(*inputs)
""")


@wrong("11.Again", "are held between forward and backward")
class KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, *inputs):
        ctx.inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            ctx.outputs = layer(*ctx.inputs)
        return tuple(y.detach() for y in ctx.outputs)

    @staticmethod
    def backward(ctx, *gradients):
        torch.autograd.backward(ctx.outputs, gradients)
        return None, *(x.grad for x in ctx.inputs)


# ---- Away(host, parameters)

Solution("11.Away").slips("""
EachTensor: three tensors share one storage
    if storage not in self.numbers: -> if True:
WeightsToo: The weights stay on the device
    if storage.data_ptr() in self.own: -> if False:
OnlyWholeParameters: The weights stay on the device
    storage.data_ptr() in self.own -> isinstance(x, torch.nn.Parameter) and x.is_leaf
ByAddress: another can get the same address
    self.numbers = weakref.WeakKeyDictionary() -> self.numbers = {}
    if storage not in self.numbers:
        self.numbers[storage] = self.host.put(storage)
    return self.numbers[storage] ->
        key = (0, storage.nbytes()) if x.shape[0] == x.shape[-1] // 2 else storage.data_ptr()
        if key not in self.numbers:
            self.numbers[key] = self.host.put(storage)
        return self.numbers[key]
ForgetsTheStride: is a tensor that differs
    x.stride() -> torch.empty(x.shape, device="meta").stride()
KeepsTheTensor: stay on the device between forward and backward
    x.stride() -> x.stride(), x
    number, dtype, *seen = kept -> number, dtype, *seen, _ = kept
""")

# ---- attend(q, tiles)

Solution("11.attend").slips("""
from_plain_zeros
    torch.zeros_like(largest), torch.zeros_like(q) -> 0.0, 0.0
without_the_largest: Subtract the largest score seen so far
    torch.maximum(largest, scores.amax(1, keepdim=True)) -> torch.zeros_like(largest)
never_corrects: by which factor?
    smaller * total -> total
    smaller * out -> out
without_the_root: e is the number of columns of q
    / q.shape[1] ** 0.5 ->
""")


@wrong("11.attend", "the same peak memory: one tile at a time")
def concatenates_all_tiles(q, tiles):
    k, v = map(torch.cat, zip(*tiles))
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v


@wrong("11.attend", "by which factor?")
def mean_of_softmaxes(q, tiles):
    parts = [torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v for k, v in tiles]
    return sum(parts) / len(parts)


# ---- choose(blocks, budget_bytes)

Solution("11.choose").slips("""
no_recompute: peak memory is 8.83 GB
    return ["none"] * len(blocks)
everything: GFLOPs are recomputed
    return ["full"] * len(blocks)
too_few: a list of 13 names, each of none, selective, full
    return ["full"] * (len(blocks) - 1)
""")


@wrong("11.choose", "which one choice for all layers needs")
def the_same_for_all(blocks, budget_bytes):
    for name in blocks[0]:
        if plan_of(u_shaped_costs(), [name] * len(blocks)).peak_bytes <= budget_bytes:
            return [name] * len(blocks)


@wrong("11.choose", "peak memory is")
def ignores_need_bytes(blocks, budget_bytes):
    """Adds up kept_bytes only."""
    level, chosen = 0, []
    for block in blocks:
        for name, cost in block.items():
            if level + cost.kept_bytes <= budget_bytes * len([*chosen, 0]) / len(blocks):
                chosen.append(name)
                level += cost.kept_bytes
                break
        else:
            chosen.append("full")
            level += block["full"].kept_bytes
    return chosen


@right("11.choose")
def halves(blocks, budget_bytes):
    """One choice for the first layers, a different choice for the remaining layers."""
    plans = []
    for one, other in product(blocks[0], repeat=2):
        for cut in range(len(blocks) + 1):
            chosen = [one] * cut + [other] * (len(blocks) - cut)
            plan = plan_of(u_shaped_costs(), chosen)
            if plan.peak_bytes <= budget_bytes:
                plans.append((plan.again_flops, chosen))
    return min(plans)[1]
