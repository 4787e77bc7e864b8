import torch

from answers import Solution, right

# ---- pieces(numels, ranks, rank)

pieces = Solution("07.pieces")
pieces.wrong(
    "forgets_to_round_up",
    "[5, 1, 4] elements on 3 ranks: rank 0 has other pieces",
    {"-(-sum(numels) // ranks)": "sum(numels) // ranks"},
)
pieces.returns(
    "whole_tensors",
    "a tensor is cut wherever a share ends",
    "[(i, 0, numel) for i, numel in enumerate(numels) if i % ranks == rank]",
)
pieces.wrong(
    "starts_in_the_share",
    "counts inside the tensor",
    {"(index, first - begin, ": "(index, first - rank * share, "},
)
pieces.wrong(
    "empty_ones_too",
    "nothing in a share is no piece",
    {
        "if first < last:": "if True:",
        "last - first))": "max(0, last - first)))",
    },
)
pieces.wrong("the_first_one_only", "has (0, 0, 7)", {"return found": "return found[0]"})

# ---- ToOwners(comm, buckets)

to_owners = Solution("07.ToOwners")
to_owners.right(
    "AllAtOnce",
    {
        "reduce_scatter_tensor(self.shares[i], flat,": """
            reduce_scatter(self.shares[i], list(flat.chunk(self.comm.size)),
        """
    },
)
to_owners.wrong(
    "ForgetsToDivide",
    "share of bucket 0 is 2 × the right one",
    {"self.buckets[i]]) / self.comm.size": "self.buckets[i]])"},
)
to_owners.wrong(
    "DividesTwice",
    "share of bucket 0 is 0.5 × the right one",
    {"self.buckets[i]]) / self.comm.size": "self.buckets[i]]) / self.comm.size**2"},
)
to_owners.wrong(
    "NeverFrees", "still had 5 gradients of buckets that it had sent", {"p.grad = None": "pass"}
)
to_owners.wrong(
    "KeepsAView",
    "holds",
    {"flat.new_empty(len(flat) // self.comm.size)": "flat.chunk(self.comm.size)[self.comm.rank]"},
)
to_owners.wrong(
    "WaitsAtOnce",
    "had waited for 2 of its reduce-scatters",
    {
        "self.handles.append(handle)": """
            self.handles.append(handle)
            handle.wait()
        """
    },
)
to_owners.wrong(
    "AllReduces",
    "rank 0 calls all_reduce",
    {
        "flat.new_empty(len(flat) // self.comm.size)": "flat.chunk(self.comm.size)[self.comm.rank]",
        "reduce_scatter_tensor(self.shares[i], flat,": "all_reduce(flat,",
        "self.handles.clear()": """
            self.handles.clear()
            self.shares = [share.clone() for share in self.shares]
        """,
    },
)
# These two send every bucket, and rightly, but when nothing is left to overlap with.
to_owners.wrong(
    "SendsInFinish",
    "had sent 0 buckets, but 2 were full",
    {
        """\
        self.missing[i] -= 1
        if self.missing[i]:
            return
""": """\
        pass

    def send(self, i):
""",
        "for handle in self.handles:": """
            for i in range(len(self.buckets)):
                self.send(i)
            for handle in self.handles:
        """,
    },
)
to_owners.wrong(
    "CountsOnTheWrongBucket",
    "had sent 0 buckets, but 2 were full",
    {
        """\
        if self.missing[i]:
            return
""": """\
        if not any(self.missing):
            for i in range(len(self.buckets)):
                self.send(i)

    def send(self, i):
"""
    },
)
to_owners.wrong(
    "DoesNotBeginAgain",
    "had sent 0 buckets, but 2 were full",
    {"self.missing = [len(bucket) for bucket in self.buckets]": "pass"},
)

# ---- ShardedAdam(comm, flat, lr)

sharded_adam = Solution("07.ShardedAdam")
sharded_adam.wrong(
    "NeverGathers",
    "has the new weights of its own share only",
    {"self.comm.all_gather_into_tensor(self.flat, self.share)": "pass"},
)
sharded_adam.wrong(
    "NoMaster",
    "weights are as they were",
    {
        "self.share.float()": "self.share",
        "gradient.float()": "gradient",
    },
)
sharded_adam.wrong(
    "MasterFromTheWeightsEachTime",
    "weights are as they were",
    {
        "self.adam.step()": """
            self.master.data.copy_(self.share)
            self.adam.step()
        """
    },
)
sharded_adam.wrong(
    "PlainSGD", "are not those of one process", {"torch.optim.AdamW": "torch.optim.SGD"}
)
sharded_adam.wrong("HalfTheRate", "are not those of one process", {"lr=lr": "lr=lr / 2"})
sharded_adam.wrong("SomewhatLess", "are not those of one process", {"lr=lr": "lr=0.6 * lr"})
sharded_adam.wrong("HalfAsMuchAgain", "are not those of one process", {"lr=lr": "lr=1.5 * lr"})
sharded_adam.wrong(
    "SkipsSteps",
    "are not those of one process",
    {
        "self.adam.step()": """
            self.is_odd = not getattr(self, "is_odd", False)
            if self.is_odd:
                self.adam.step()
        """
    },
)
sharded_adam.wrong(
    "StateOfEverybody",
    "bytes per parameter beside the weights",
    {
        "self.share.float()": "flat.float()",
        "self.master.grad = gradient.float()": """
            self.master.grad = torch.zeros(len(self.flat))
            self.master.grad.chunk(self.comm.size)[self.comm.rank].copy_(gradient)
        """,
        "self.share.copy_(self.master.detach())": """
            self.share.copy_(self.master.detach().chunk(self.comm.size)[self.comm.rank])
        """,
    },
)
sharded_adam.wrong(
    "KeepsTheGradient",
    "bytes per parameter beside the weights",
    {"self.master.grad = None": "pass"},
)
sharded_adam.wrong(
    "GathersInFp32",
    "bytes in 20 steps",
    {
        "self.comm.all_gather_into_tensor(self.flat, self.share)": """
            whole = torch.empty(len(self.flat))
            self.comm.all_gather_into_tensor(whole, self.master.detach())
            self.flat.copy_(whole)
        """
    },
)


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

clip = Solution("07.clip")
clip.wrong("its_own_norm", "rank 0 finds a norm of", {"comm.all_reduce(total)": "pass"})
clip.wrong(
    "adds_norms",
    "which numbers may be added",
    {
        "for share in shares)": "for share in shares).sqrt()",
        "norm = total.sqrt()": "norm = total",
    },
)
clip.wrong("always_scales", "short enough stays as it is", {".clamp(max=1.0)": ""})
clip.wrong("scales_copies", "in place", {"share *= ": "share = share * "})
clip.wrong(
    "gathers_everything",
    "expected: one number",
    {
        "comm.all_reduce(total)": """
            mine = torch.cat(shares)
            whole = torch.empty(len(mine) * comm.size)
            comm.all_gather_into_tensor(whole, mine)
            total = whole.square().sum()
        """
    },
)

# ---- choose_buckets(backward, messages)

choose_buckets = Solution("07.choose_buckets")
choose_buckets.returns("one_bucket", "the peaks are", "[len(backward.nbytes)]")
choose_buckets.returns("one_for_each", "rank 0 sends 100 messages", "[1] * len(backward.nbytes)")
choose_buckets.returns(
    "loses_the_rest", "that does not cut 100 gradients into buckets", "[3] * messages"
)
choose_buckets.returns(
    "almost_all_in_the_last",
    "the peaks are",
    "[1] * (messages - 1) + [len(backward.nbytes) - messages + 1]",
)
choose_buckets.returns(
    "as_many_in_each",
    "expected: less than 126.1 MB",
    "equal_counts(len(backward.nbytes), messages)",
)
