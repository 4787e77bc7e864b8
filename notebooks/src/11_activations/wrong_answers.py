import weakref
from itertools import product

import torch

from answers import right, wrong
from labkit.memory.chooser import plan_of

from .scenarios import SEQUENCES, u_shaped

# ---- Again: forward(ctx, layer, *inputs), backward(ctx, *gradients)


class RightAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, *inputs):
        ctx.layer, ctx.rng = layer, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return layer(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *again(ctx, gradients)


def run_again(ctx):
    inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(ctx.rng)
        return inputs, ctx.layer(*inputs)


def again(ctx, gradients):
    inputs, outputs = run_again(ctx)
    torch.autograd.backward(outputs, gradients)
    return [x.grad for x in inputs]


@right("11.Again")
class OneSum(RightAgain):
    """One number whose gradient is that of all outputs."""

    @staticmethod
    def backward(ctx, *gradients):
        inputs, outputs = run_again(ctx)
        with torch.enable_grad():
            sum((y * dy).sum() for y, dy in zip(outputs, gradients)).backward()
        return None, *(x.grad for x in inputs)


@wrong("11.Again", "takes 3 positional arguments but 4 were given")
class OfOneInput(torch.autograd.Function):
    """B of "Three by hand", as it stands above the exercise."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer, ctx.rng = layer, torch.get_rng_state()
        ctx.save_for_backward(x)
        return layer(x)


@wrong("11.Again", "no gradient has come to the weights")
class TheFirstInputAlone(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        inputs, outputs = run_again(ctx)
        return None, torch.autograd.grad(outputs[0], inputs[0], gradients[0])[0], None


@wrong("11.Again", "is not right")
class TheFirstOutputAlone(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        inputs, outputs = run_again(ctx)
        torch.autograd.backward(outputs[0], gradients[0])
        return None, *(x.grad for x in inputs)


@wrong("11.Again", "Which mask does dropout draw the second time?")
class NewMasks(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        ctx.rng = torch.get_rng_state()
        return None, *again(ctx, gradients)


@wrong("11.Again", "other random numbers are drawn")
class LeavesTheGeneratorThere(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        torch.set_rng_state(ctx.rng)
        with torch.enable_grad():
            outputs = ctx.layer(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, *(x.grad for x in inputs)


@wrong("11.Again", "are held between forward and backward")
class KeepsTheGraph(RightAgain):
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


@wrong("11.Again", "no gradient has come to the weights")
class OnlyTheInput(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        inputs, outputs = run_again(ctx)
        return None, *torch.autograd.grad(outputs, inputs, gradients)


@wrong("11.Again", "It is twice the right one")
class Twice(RightAgain):
    @staticmethod
    def backward(ctx, *gradients):
        again(ctx, gradients)
        return None, *again(ctx, gradients)


# ---- Away(host, parameters)


class RightAway:
    def __init__(self, host, parameters):
        self.host, self.own = host, {p.untyped_storage().data_ptr() for p in parameters}
        self.numbers = weakref.WeakKeyDictionary()

    def stays(self, x):
        return x.untyped_storage().data_ptr() in self.own

    def number(self, x):
        storage = x.untyped_storage()
        if storage not in self.numbers:
            self.numbers[storage] = self.host.put(storage)
        return self.numbers[storage]

    def pack(self, x):
        if self.stays(x):
            return x
        return self.number(x), x.dtype, x.storage_offset(), x.shape, x.stride()

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        number, dtype, *seen = kept
        return torch.empty(0, dtype=dtype).set_(self.host.get(number), *seen)


@wrong("11.Away", "one memory, three tensors")
class EachTensor(RightAway):
    def number(self, x):
        return self.host.put(x.untyped_storage())


@wrong("11.Away", "The weights are on the device anyway")
class WeightsToo(RightAway):
    def stays(self, x):
        return False


@wrong("11.Away", "The weights are on the device anyway")
class OnlyWholeParameters(RightAway):
    def stays(self, x):
        return isinstance(x, torch.nn.Parameter) and x.is_leaf


@wrong("11.Away", "an address is free for another tensor")
class ByAddress(RightAway):
    def __init__(self, host, parameters):
        super().__init__(host, parameters)
        self.numbers = {}

    def number(self, x):
        storage = x.untyped_storage()
        key = (0, storage.nbytes()) if x.shape[0] == x.shape[-1] // 2 else storage.data_ptr()
        if key not in self.numbers:
            self.numbers[key] = self.host.put(storage)
        return self.numbers[key]


@wrong("11.Away", "is not right")
class ForgetsTheStride(RightAway):
    def pack(self, x):
        kept = super().pack(x)
        if isinstance(kept, torch.Tensor):
            return kept
        return *kept[:-1], torch.empty(x.shape, device="meta").stride()


@wrong("11.Away", "stay on the device between forward and backward")
class TheTicketHoldsIt(RightAway):
    def pack(self, x):
        kept = super().pack(x)
        return kept if isinstance(kept, torch.Tensor) else (kept, x)

    def unpack(self, kept):
        return super().unpack(kept if isinstance(kept, torch.Tensor) else kept[0])


# ---- attend(q, tiles)


def scores_of(q, k):
    return q @ k.T / q.shape[1] ** 0.5


@right("11.attend")
def in_double(q, tiles):
    largest, total, out = torch.full((len(q), 1), -torch.inf), 0.0, 0.0
    for k, v in tiles:
        scores = scores_of(q, k)
        larger = torch.maximum(largest, scores.amax(1, keepdim=True))
        smaller, weights = (largest - larger).exp(), (scores - larger).exp()
        total, out = smaller * total + weights.sum(1, keepdim=True), smaller * out + weights @ v
        largest = larger
    return out / total


@wrong("11.attend", "expected: as many: one tile at a time")
def collects(q, tiles):
    keys, values = zip(*tiles)
    return torch.softmax(scores_of(q, torch.cat(keys)), dim=1) @ torch.cat(values)


@wrong("11.attend", "Subtract the largest score")
def without_the_largest(q, tiles):
    total = out = 0
    for k, v in tiles:
        weights = scores_of(q, k).exp()
        total, out = total + weights.sum(1, keepdim=True), out + weights @ v
    return out / total


@wrong("11.attend", "by which factor?")
def never_corrects(q, tiles):
    largest, total, out = torch.full((len(q), 1), -torch.inf), 0, 0
    for k, v in tiles:
        largest = torch.maximum(largest, scores_of(q, k).amax(1, keepdim=True))
        weights = (scores_of(q, k) - largest).exp()
        total, out = total + weights.sum(1, keepdim=True), out + weights @ v
    return out / total


@wrong("11.attend", "by which factor?")
def mean_of_softmaxes(q, tiles):
    parts = [torch.softmax(scores_of(q, k), dim=1) @ v for k, v in tiles]
    return sum(parts) / len(parts)


@wrong("11.attend", "with e numbers in a row of q")
def without_the_root(q, tiles):
    return in_double(q * q.shape[1] ** 0.5, tiles)


# ---- choose(blocks, budget_bytes)


@wrong("11.choose", "the peak is 8.83 GB")
def nothing(blocks, budget_bytes):
    return ["none"] * len(blocks)


@wrong("11.choose", "billion operations are computed twice")
def everything(blocks, budget_bytes):
    return ["full"] * len(blocks)


@wrong("11.choose", "which one choice for all layers needs")
def the_same_for_all(blocks, budget_bytes):
    for name in blocks[0]:
        if plan_of(u_shaped(), [name] * len(blocks)).peak_bytes <= budget_bytes:
            return [name] * len(blocks)


@wrong("11.choose", f"expected: {len(SEQUENCES)} times one of none, selective, full")
def too_few(blocks, budget_bytes):
    return ["full"] * (len(blocks) - 1)


@wrong("11.choose", "the peak is")
def forgets_what_is_needed(blocks, budget_bytes):
    """Looks at the sum of what is kept only."""
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
    """One choice for the first layers, another for the rest."""
    plans = []
    for one, other in product(blocks[0], repeat=2):
        for cut in range(len(blocks) + 1):
            chosen = [one] * cut + [other] * (len(blocks) - cut)
            plan = plan_of(u_shaped(), chosen)
            if plan.peak_bytes <= budget_bytes:
                plans.append((plan.again_flops, chosen))
    return min(plans)[1]
