import torch

from answers import Solution, right

# ---- pieces(numels, ranks, rank)

Solution("07.pieces").slips("""
forgets_to_round_up: pieces([5, 1, 4], 3, 0) returned wrong pieces
    -(-sum(numels) // ranks) -> sum(numels) // ranks
whole_tensors: split a tensor where a share ends
    return [(i, 0, numel) for i, numel in enumerate(numels) if i % ranks == rank]
starts_in_the_share: counts from the first element of the tensor
    (index, first - begin, -> (index, first - rank * share,
empty_pieces_too: Leave out a tensor that has no elements in the share
    if first < last: -> if True:
    last - first)) -> max(0, last - first)))
the_first_piece_only: returned (0, 0, 7)
    return found -> return found[0]
""")

# ---- ToOwners(comm, buckets)

Solution("07.ToOwners").slips("""
AllAtOnce
    reduce_scatter_tensor(self.shares[i], flat, ->
        reduce_scatter(self.shares[i], list(flat.chunk(self.comm.size)),
ForgetsToDivide: share of bucket 0 is 2 × the correct share
    self.buckets[i]]) / self.comm.size -> self.buckets[i]])
DividesTwice: share of bucket 0 is 0.5 × the correct share
    self.buckets[i]]) / self.comm.size -> self.buckets[i]]) / self.comm.size**2
NeverFrees: still held 5 gradients of buckets in flight
    p.grad = None -> pass
KeepsAView: bytes of gradients
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
# The next two answers send every bucket correctly, but too late to overlap.
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
DoesNotResetTheCounts: had sent 0 buckets, but 2 were full
    self.missing = [len(bucket) for bucket in self.buckets] -> pass
""")

# ---- ShardedAdam(comm, flat, lr)

Solution("07.ShardedAdam").slips("""
NeverGathers: has the new weights of its own share only
    self.comm.all_gather_into_tensor(self.flat, self.share) -> pass
NoMaster: weights have not changed
    self.share.float() -> self.share
    gradient.float() -> gradient
MasterFromTheWeightsEachTime: weights have not changed
    self.adam.step() ->
        self.master.data.copy_(self.share)
        self.adam.step()
PlainSGD: weights are wrong in share
    torch.optim.AdamW -> torch.optim.SGD
HalfTheRate: weights are wrong in share
    lr=lr -> lr=lr / 2
LowerRate: weights are wrong in share
    lr=lr -> lr=0.6 * lr
OneAndAHalfTimesTheRate: weights are wrong in share
    lr=lr -> lr=1.5 * lr
SkipsSteps: weights are wrong in share
    self.adam.step() ->
        self.is_odd = not getattr(self, "is_odd", False)
        if self.is_odd:
            self.adam.step()
StateOfAllShares: bytes per parameter in addition to the weights
    self.share.float() -> flat.float()
    self.master.grad = gradient.float() ->
        self.master.grad = torch.zeros(len(self.flat))
        self.master.grad.chunk(self.comm.size)[self.comm.rank].copy_(gradient)
    self.share.copy_(self.master.detach()) ->
        self.share.copy_(self.master.detach().chunk(self.comm.size)[self.comm.rank])
KeepsTheGradient: bytes per parameter in addition to the weights
    self.master.grad = None -> pass
GathersInFp32: bytes in 20 steps
    self.comm.all_gather_into_tensor(self.flat, self.share) ->
        whole = torch.empty(len(self.flat))
        self.comm.all_gather_into_tensor(whole, self.master.detach())
        self.flat.copy_(whole)
""")


@right("07.ShardedAdam")
class AdamByHand:
    """Adam as Kingma and Ba write it, with weight decay added to the step."""

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
its_own_norm: rank 0 should return a norm of
    comm.all_reduce(total) -> pass
adds_norms: which values may you add
    for share in shares) -> for share in shares).sqrt()
    norm = total.sqrt() -> norm = total
always_scales: within max_norm stays unchanged
    .clamp(max=1.0) ->
scales_copies: Scale the shares in place
    share *= -> share = share *
gathers_everything: expected: one element
    comm.all_reduce(total) ->
        mine = torch.cat(shares)
        whole = torch.empty(len(mine) * comm.size)
        comm.all_gather_into_tensor(whole, mine)
        total = whole.square().sum()
""")

# ---- choose_buckets(backward, messages)

Solution("07.choose_buckets").slips("""
one_bucket: the two clusters' peaks add up to
    return [len(backward.nbytes)]
one_message_for_each_gradient: rank 0 sends 100 messages
    return [1] * len(backward.nbytes)
drops_the_remainder: which does not split 100 gradients into buckets
    return [3] * messages
almost_all_in_the_last: the two clusters' peaks add up to
    return [1] * (messages - 1) + [len(backward.nbytes) - messages + 1]
equal_counts: expected: less than 126.1 MB
    return equal_counts(len(backward.nbytes), messages)
""")
