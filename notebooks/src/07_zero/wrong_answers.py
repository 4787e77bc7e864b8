from functools import partial

import torch
from torch import nn

from answers import right, wrong

from .buckets import equal_counts

# ---- pieces(numels, ranks, rank)


def cut(numels, share, rank):
    found, begin = [], 0
    for index, numel in enumerate(numels):
        first, last = max(begin, rank * share), min(begin + numel, (rank + 1) * share)
        if first < last:
            found.append((index, first - begin, last - first))
        begin += numel
    return found


@wrong("07.pieces", "[5, 1, 4] elements on 3 ranks: rank 0 has other pieces")
def forgets_to_round_up(numels, ranks, rank):
    return cut(numels, sum(numels) // ranks, rank)


@wrong("07.pieces", "a tensor is cut wherever a share ends")
def whole_tensors(numels, ranks, rank):
    return [(i, 0, numel) for i, numel in enumerate(numels) if i % ranks == rank]


@wrong("07.pieces", "counts inside the tensor")
def starts_in_the_share(numels, ranks, rank):
    share, at, found = -(-sum(numels) // ranks), 0, []
    for index, _, numel in cut(numels, share, rank):
        found.append((index, at, numel))
        at += numel
    return found


@wrong("07.pieces", "nothing in a share is no piece")
def empty_ones_too(numels, ranks, rank):
    its = {index: (index, *rest) for index, *rest in cut(numels, -(-sum(numels) // ranks), rank)}
    return [its.get(index, (index, 0, 0)) for index in range(len(numels))]


@wrong("07.pieces", "has (0, 0, 7)")
def the_first_one_only(numels, ranks, rank):
    return cut(numels, -(-sum(numels) // ranks), rank)[0]


# ---- ToOwners(comm, buckets)


class Right:
    def __init__(self, comm, buckets):
        self.comm, self.buckets = comm, buckets
        self.missing = [len(bucket) for bucket in buckets]
        self.shares, self.sending = [None] * len(buckets), []
        for i, bucket in enumerate(buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self.gradient_is_there, i))

    def gradient_is_there(self, i, p):
        self.missing[i] -= 1
        if not self.missing[i]:
            self.send(i)

    def flat(self, i):
        numel = sum(p.numel() for p in self.buckets[i])
        flat = torch.zeros(-(-numel // self.comm.size) * self.comm.size)
        torch.cat([p.grad.view(-1) for p in self.buckets[i]], out=flat[:numel])
        return flat.div_(self.comm.size)

    def forget(self, i):
        for p in self.buckets[i]:
            p.grad = None

    def send(self, i):
        flat = self.flat(i)
        self.forget(i)
        self.shares[i] = torch.empty(len(flat) // self.comm.size)
        handle = self.comm.reduce_scatter_tensor(self.shares[i], flat, async_op=True)
        self.sending.append(handle)

    def finish(self):
        for handle in self.sending:
            handle.wait()
        self.sending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]


@right("07.ToOwners")
class AllAtOnce(Right):
    """By the list variant, without a flat bucket of its own for what arrives."""

    def send(self, i):
        parts = list(self.flat(i).chunk(self.comm.size))
        self.forget(i)
        self.shares[i] = torch.empty_like(parts[0])
        self.sending.append(self.comm.reduce_scatter(self.shares[i], parts, async_op=True))


@wrong("07.ToOwners", "share of bucket 0 is 2 × the right one")
class ForgetsToDivide(Right):
    def flat(self, i):
        return super().flat(i).mul_(self.comm.size)


@wrong("07.ToOwners", "share of bucket 0 is 0.5 × the right one")
class DividesTwice(Right):
    def finish(self):
        super().finish()
        for share in self.shares:
            share /= self.comm.size


@wrong("07.ToOwners", "still had 5 gradients of buckets that it had sent")
class NeverFrees(Right):
    def forget(self, i):
        pass


@wrong("07.ToOwners", "holds")
class KeepsAView(Right):
    def send(self, i):
        flat = self.flat(i)
        self.forget(i)
        self.shares[i] = flat.chunk(self.comm.size)[self.comm.rank]
        self.sending.append(self.comm.reduce_scatter_tensor(self.shares[i], flat, async_op=True))


@wrong("07.ToOwners", "had sent 0 buckets, but 2 were full")
class SendsInFinish(Right):
    def gradient_is_there(self, i, p):
        pass

    def finish(self):
        for i in range(len(self.buckets)):
            self.send(i)
        super().finish()


@wrong("07.ToOwners", "had waited for 2 of its reduce-scatters")
class WaitsAtOnce(Right):
    def send(self, i):
        super().send(i)
        self.sending[-1].wait()


@wrong("07.ToOwners", "rank 0 calls all_reduce")
class AllReduces(Right):
    def send(self, i):
        flat = self.flat(i)
        self.forget(i)
        self.sending.append(self.comm.all_reduce(flat, async_op=True))
        self.shares[i] = flat.chunk(self.comm.size)[self.comm.rank]

    def finish(self):
        super().finish()
        self.shares = [share.clone() for share in self.shares]


@wrong("07.ToOwners", "had sent 0 buckets, but 2 were full")
class CountsOnTheWrongBucket(Right):
    def gradient_is_there(self, i, p):
        self.missing[i] -= 1
        if not any(self.missing):
            for i in range(len(self.buckets)):
                self.send(i)


@wrong("07.ToOwners", "had sent 0 buckets, but 2 were full")
class DoesNotBeginAgain(Right):
    def finish(self):
        for handle in self.sending:
            handle.wait()
        self.sending.clear()


# ---- ShardedAdam(comm, flat, lr)


class RightAdam:
    def __init__(self, comm, flat, lr):
        self.comm, self.flat = comm, flat
        self.mine = flat.chunk(comm.size)[comm.rank]
        self.master = nn.Parameter(self.first_master())
        self.adam = torch.optim.AdamW([self.master], lr=lr)

    def first_master(self):
        return self.mine.float()

    def update(self, gradient):
        self.master.grad = gradient.float()
        self.adam.step()
        self.master.grad = None
        self.mine.copy_(self.master.detach())

    def step(self, gradient):
        self.update(gradient)
        self.comm.all_gather_into_tensor(self.flat, self.mine)


@wrong("07.ShardedAdam", "has the new weights of its own share only")
class NeverGathers(RightAdam):
    def step(self, gradient):
        self.update(gradient)


@wrong("07.ShardedAdam", "weights are as they were")
class NoMaster(RightAdam):
    def first_master(self):
        return self.mine

    def update(self, gradient):
        self.master.grad = gradient
        self.adam.step()
        self.master.grad = None


@wrong("07.ShardedAdam", "weights are as they were")
class MasterFromTheWeightsEachTime(RightAdam):
    def update(self, gradient):
        self.master.data.copy_(self.mine)
        super().update(gradient)


@wrong("07.ShardedAdam", "are not those of one process")
class PlainSGD(RightAdam):
    def __init__(self, comm, flat, lr):
        super().__init__(comm, flat, lr)
        self.adam = torch.optim.SGD([self.master], lr=lr)


@wrong("07.ShardedAdam", "are not those of one process")
class HalfTheRate(RightAdam):
    def __init__(self, comm, flat, lr):
        super().__init__(comm, flat, lr / 2)


@wrong("07.ShardedAdam", "are not those of one process")
class SomewhatLess(RightAdam):
    def __init__(self, comm, flat, lr):
        super().__init__(comm, flat, 0.6 * lr)


@wrong("07.ShardedAdam", "are not those of one process")
class HalfAsMuchAgain(RightAdam):
    def __init__(self, comm, flat, lr):
        super().__init__(comm, flat, 1.5 * lr)


@wrong("07.ShardedAdam", "are not those of one process")
class SkipsSteps(RightAdam):
    steps = 0

    def update(self, gradient):
        self.steps += 1
        if self.steps % 2:
            super().update(gradient)


@right("07.ShardedAdam")
class AdamByHand(RightAdam):
    """As Kingma and Ba write it, with the decay taken together with the step."""

    def __init__(self, comm, flat, lr):
        self.comm, self.flat, self.lr, self.steps = comm, flat, lr, 0
        self.mine = flat.chunk(comm.size)[comm.rank]
        self.copy = self.mine.float()
        self.m, self.v = torch.zeros_like(self.copy), torch.zeros_like(self.copy)

    def update(self, gradient):
        self.steps += 1
        self.m += 0.1 * (gradient.float() - self.m)
        self.v += 0.001 * (gradient.float().square() - self.v)
        m, v = self.m / (1 - 0.9**self.steps), self.v / (1 - 0.999**self.steps)
        self.copy -= self.lr * (m / (v.sqrt() + 1e-8) + 0.01 * self.copy)
        self.mine.copy_(self.copy)


@wrong("07.ShardedAdam", "bytes per parameter beside the weights")
class StateOfEverybody(RightAdam):
    def first_master(self):
        return self.flat.float()

    def update(self, gradient):
        whole = torch.zeros(len(self.flat))
        whole.chunk(self.comm.size)[self.comm.rank].copy_(gradient)
        self.master.grad = whole
        self.adam.step()
        self.master.grad = None
        self.mine.copy_(self.master.detach().chunk(self.comm.size)[self.comm.rank])


@wrong("07.ShardedAdam", "bytes per parameter beside the weights")
class KeepsTheGradient(RightAdam):
    def update(self, gradient):
        self.master.grad = gradient.float()
        self.adam.step()
        self.mine.copy_(self.master.detach())


@wrong("07.ShardedAdam", "bytes in 20 steps")
class GathersInFp32(RightAdam):
    def step(self, gradient):
        self.update(gradient)
        whole = torch.empty(len(self.flat))
        self.comm.all_gather_into_tensor(whole, self.master.detach())
        self.flat.copy_(whole)


# ---- clip(comm, shares, max_norm)


def scaled(shares, norm, max_norm):
    for share in shares:
        share *= min(1, max_norm / (norm + 1e-6))
    return norm


def squares(shares):
    return sum(share.double().square().sum() for share in shares)


@wrong("07.clip", "rank 0 finds a norm of")
def its_own_norm(comm, shares, max_norm):
    return scaled(shares, float(squares(shares).sqrt()), max_norm)


@wrong("07.clip", "which numbers may be added")
def adds_norms(comm, shares, max_norm):
    norm = squares(shares).sqrt()
    comm.all_reduce(norm)
    return scaled(shares, float(norm), max_norm)


@wrong("07.clip", "short enough stays as it is")
def always_scales(comm, shares, max_norm):
    total = squares(shares)
    comm.all_reduce(total)
    for share in shares:
        share *= max_norm / float(total.sqrt())
    return float(total.sqrt())


@wrong("07.clip", "in place")
def scales_copies(comm, shares, max_norm):
    total = squares(shares)
    comm.all_reduce(total)
    return scaled([share.clone() for share in shares], float(total.sqrt()), max_norm)


@wrong("07.clip", "expected: one number")
def gathers_everything(comm, shares, max_norm):
    mine = torch.cat(shares)
    whole = torch.empty(len(mine) * comm.size)
    comm.all_gather_into_tensor(whole, mine)
    return scaled(shares, float(whole.norm()), max_norm)


# ---- choose_buckets(backward, messages)


@wrong("07.choose_buckets", "the peaks are")
def one_bucket(backward, messages):
    return [len(backward.nbytes)]


@wrong("07.choose_buckets", "rank 0 sends 100 messages")
def one_for_each(backward, messages):
    return [1] * len(backward.nbytes)


@wrong("07.choose_buckets", "that does not cut 100 gradients into buckets")
def loses_the_rest(backward, messages):
    return [3] * messages


@wrong("07.choose_buckets", "the peaks are")
def almost_all_in_the_last(backward, messages):
    return [1] * (messages - 1) + [len(backward.nbytes) - messages + 1]


@wrong("07.choose_buckets", "expected: less than 126.1 MB")
def as_many_in_each(backward, messages):
    return equal_counts(len(backward.nbytes), messages)
