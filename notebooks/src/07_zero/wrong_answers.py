import torch

from answers import Solution, right

# ---- pieces(numels, ranks, rank)

Solution("07.pieces").slips("""
forgets_to_round_up: [5, 1, 4] elements on 3 ranks: rank 0 has other pieces
    -(-sum(numels) // ranks) -> sum(numels) // ranks
whole_tensors: a tensor is cut wherever a share ends
    return [(i, 0, numel) for i, numel in enumerate(numels) if i % ranks == rank]
starts_in_the_share: counts inside the tensor
    (index, first - begin, -> (index, first - rank * share,
empty_ones_too: nothing in a share is no piece
    if first < last: -> if True:
    last - first)) -> max(0, last - first)))
the_first_one_only: has (0, 0, 7)
    return found -> return found[0]
""")

# ---- ToOwners(comm, buckets)

Solution("07.ToOwners").slips("""
AllAtOnce
    reduce_scatter_tensor(self.shares[i], flat, ->
        reduce_scatter(self.shares[i], list(flat.chunk(self.comm.size)),
ForgetsToDivide: share of bucket 0 is 2 × the right one
    self.buckets[i]]) / self.comm.size -> self.buckets[i]])
DividesTwice: share of bucket 0 is 0.5 × the right one
    self.buckets[i]]) / self.comm.size -> self.buckets[i]]) / self.comm.size**2
NeverFrees: still had 5 gradients of buckets that it had sent
    p.grad = None -> pass
KeepsAView: holds
    flat.new_empty(len(flat) // self.comm.size) -> flat.chunk(self.comm.size)[self.comm.rank]
WaitsAtOnce: had waited for 2 of its reduce-scatters
    self.handles.append(handle) ->
        self.handles.append(handle)
        handle.wait()
AllReduces: rank 0 calls all_reduce
    flat.new_empty(len(flat) // self.comm.size) -> flat.chunk(self.comm.size)[self.comm.rank]
    reduce_scatter_tensor(self.shares[i], flat, -> all_reduce(flat,
    self.handles.clear() ->
        self.handles.clear()
        self.shares = [share.clone() for share in self.shares]
# These two send every bucket, and rightly, but when nothing is left to overlap with.
SendsInFinish: had sent 0 buckets, but 2 were full
    self.missing[i] -= 1
    if self.missing[i]:
        return ->
    def gradient_is_there(self, i, p): ->
        def gradient_is_there(self, i, p):
            pass
        def send(self, i):
    for handle in self.handles: ->
        for i in range(len(self.buckets)):
            self.send(i)
        for handle in self.handles:
CountsOnTheWrongBucket: had sent 0 buckets, but 2 were full
    self.missing[i] -= 1
    if self.missing[i]:
        return ->
    def gradient_is_there(self, i, p): ->
        def gradient_is_there(self, i, p):
            self.missing[i] -= 1
            if not any(self.missing):
                for i in range(len(self.buckets)):
                    self.send(i)
        def send(self, i):
DoesNotBeginAgain: had sent 0 buckets, but 2 were full
    self.missing = [len(bucket) for bucket in self.buckets] -> pass
""")

# ---- ShardedAdam(comm, flat, lr)

Solution("07.ShardedAdam").slips("""
NeverGathers: has the new weights of its own share only
    self.comm.all_gather_into_tensor(self.flat, self.share) -> pass
NoMaster: weights are as they were
    self.share.float() -> self.share
    gradient.float() -> gradient
MasterFromTheWeightsEachTime: weights are as they were
    self.adam.step() ->
        self.master.data.copy_(self.share)
        self.adam.step()
PlainSGD: are not those of one process
    torch.optim.AdamW -> torch.optim.SGD
HalfTheRate: are not those of one process
    lr=lr -> lr=lr / 2
SomewhatLess: are not those of one process
    lr=lr -> lr=0.6 * lr
HalfAsMuchAgain: are not those of one process
    lr=lr -> lr=1.5 * lr
SkipsSteps: are not those of one process
    self.adam.step() ->
        self.is_odd = not getattr(self, "is_odd", False)
        if self.is_odd:
            self.adam.step()
StateOfEverybody: bytes per parameter beside the weights
    self.share.float() -> flat.float()
    self.master.grad = gradient.float() ->
        self.master.grad = torch.zeros(len(self.flat))
        self.master.grad.chunk(self.comm.size)[self.comm.rank].copy_(gradient)
    self.share.copy_(self.master.detach()) ->
        self.share.copy_(self.master.detach().chunk(self.comm.size)[self.comm.rank])
KeepsTheGradient: bytes per parameter beside the weights
    self.master.grad = None -> pass
GathersInFp32: bytes in 20 steps
    self.comm.all_gather_into_tensor(self.flat, self.share) ->
        whole = torch.empty(len(self.flat))
        self.comm.all_gather_into_tensor(whole, self.master.detach())
        self.flat.copy_(whole)
""")


@right("07.ShardedAdam")
class AdamByHand:
    """As Kingma and Ba write it, with the decay taken together with the step."""

    def __init__(self, comm, flat, lr):
        self.comm, self.flat, self.lr, self.steps = comm, flat, lr, 0
        self.mine = flat.chunk(comm.size)[comm.rank]
        self.copy = self.mine.float()
        self.m, self.v = torch.zeros_like(self.copy), torch.zeros_like(self.copy)

    def step(self, gradient):
        self.steps += 1
        self.m += 0.1 * (gradient.float() - self.m)
        self.v += 0.001 * (gradient.float().square() - self.v)
        m, v = self.m / (1 - 0.9**self.steps), self.v / (1 - 0.999**self.steps)
        self.copy -= self.lr * (m / (v.sqrt() + 1e-8) + 0.01 * self.copy)
        self.mine.copy_(self.copy)
        self.comm.all_gather_into_tensor(self.flat, self.mine)


# ---- clip(comm, shares, max_norm)

Solution("07.clip").slips("""
its_own_norm: rank 0 finds a norm of
    comm.all_reduce(total) -> pass
adds_norms: which numbers may be added
    for share in shares) -> for share in shares).sqrt()
    norm = total.sqrt() -> norm = total
always_scales: short enough stays as it is
    .clamp(max=1.0) ->
scales_copies: in place
    share *= -> share = share *
gathers_everything: expected: one number
    comm.all_reduce(total) ->
        mine = torch.cat(shares)
        whole = torch.empty(len(mine) * comm.size)
        comm.all_gather_into_tensor(whole, mine)
        total = whole.square().sum()
""")

# ---- choose_buckets(backward, messages)

Solution("07.choose_buckets").slips("""
one_bucket: the peaks are
    return [len(backward.nbytes)]
one_for_each: rank 0 sends 100 messages
    return [1] * len(backward.nbytes)
loses_the_rest: that does not cut 100 gradients into buckets
    return [3] * messages
almost_all_in_the_last: the peaks are
    return [1] * (messages - 1) + [len(backward.nbytes) - messages + 1]
as_many_in_each: expected: less than 126.1 MB
    return equal_counts(len(backward.nbytes), messages)
""")
