import torch.nn.functional as F

from answers import Solution, wrong

# ---- average_gradients(comm, model)

Solution("05.average_gradients").slips("""
forgets_to_divide: rank 0's gradient of 0.weight is 2 × the correct gradient
    p.grad.div_(comm.size) -> pass
always_divides_by_two: on 3 ranks, rank 0's gradient of 0.weight is 1.5 × the correct gradient
    div_(comm.size) -> div_(2)
averages_the_weights: rank 0's gradient of 0.weight is a tensor that differs in
    p.grad.div_(comm.size) -> p.detach().div_(comm.size)
    comm.all_reduce(p.grad) -> comm.all_reduce(p.detach())
averages_the_weights_too: rank 0's weights have changed
    p.grad.div_(comm.size) ->
        p.grad.div_(comm.size)
        p.detach().mul_(0.9)
skips_the_biases: rank 0's gradient of 0.bias is a tensor that differs in
    p.grad.div_(comm.size) ->
        if p.ndim == 1: continue
        p.grad.div_(comm.size)
averages_twice: rank 0 calls 16 all-reduces
    model.parameters() -> [*model.parameters()] * 2
starts_at_another_parameter_on_each_rank: the ranks disagree about collective
    model.parameters() -> ([*model.parameters()] * 2)[comm.rank : comm.rank + 8]
""")

# ---- average_in_buckets(comm, model, bucket_bytes)

Solution("05.average_in_buckets").slips("""
one_bucket_for_everything: of 200 bytes, rank 0 should send 3 messages, not 1
    > bucket_bytes -> > 10**9
one_message_for_each_gradient: rank 0 should send 3 messages, not 8
    > bucket_bytes -> > 0
first_parameter_first: rank 0 sends messages of the wrong sizes
    reversed(list(model.parameters())) -> model.parameters()
in_a_larger_dtype: rank 0 sends messages of the wrong sizes
    for g in gradients]) / comm.size -> for g in gradients]).double() / comm.size
leaves_the_result_in_the_bucket: expected: the gradient of the global batch
    g.copy_(part.view_as(g)) -> pass
forgets_the_last_bucket: rank 0's gradient of 0.weight is a tensor that differs in
    in buckets: -> in buckets[:-1]:
""")

# ---- Overlapped(comm, model)

Solution("05.Overlapped").slips("""
SendsInFinish: rank 0 had started none of the 6 possible all-reduces
    self.handles.append(self.comm.all_reduce(p.grad, async_op=True)) -> self.handles.append(p)
    handle.wait() -> self.comm.all_reduce(handle.grad)
BlocksInTheHook: rank 0 blocks in 6 all-reduces during backward
    self.handles.append(self.comm.all_reduce(p.grad, async_op=True)) -> self.comm.all_reduce(p.grad)
WaitsAtOnce: rank 0 waited for 6 of its handles
    async_op=True)) ->
        async_op=True))
        self.handles[-1].wait()
NeverWaits: returns before its all_reduce has completed
    handle.wait() -> pass
ForgetsToDivide: rank 0's gradient of 0.weight is 2 × the correct gradient
    p.grad.div_(self.comm.size) -> pass
SendsTheMatricesEarly: had started 3 all-reduces
    self.handles.append(self.comm.all_reduce(p.grad, async_op=True)) ->
        early = p.ndim > 1 or p.numel() == 3
        self.handles.append(self.comm.all_reduce(p.grad, async_op=True) if early else p)
    handle.wait() -> handle.wait() if hasattr(handle, "wait") else self.comm.all_reduce(handle.grad)
""")

# ---- accumulate(ddp, parts)

Solution("05.accumulate").slips("""
without_no_sync: 4 × the necessary bytes
    with ddp.no_sync(): -> if True:
never_sends: with micro-batches of [3, 3, 3, 3] rows, rank 0's gradient of 0.weight is a tensor
    parts[:-1] -> parts
    x, y = parts[-1] -> return
keeps_the_last_part_only: rank 0's gradient of 0.weight is a tensor that differs in
    return F.mse_loss(ddp(parts[-1][0]), parts[-1][1]).backward()
""")


def one_by_one(ddp, parts, weight):
    with ddp.no_sync():
        for x, y in parts[:-1]:
            (F.mse_loss(ddp(x), y) * weight(x)).backward()
    x, y = parts[-1]
    (F.mse_loss(ddp(x), y) * weight(x)).backward()


@wrong("05.accumulate", "rank 0's gradient of 0.weight is 4 × the correct gradient")
def forgets_to_divide_by_the_parts(ddp, parts):
    one_by_one(ddp, parts, lambda x: 1)


@wrong("05.accumulate", "[4, 4, 4, 1] rows, rank 0's gradient of 0.weight is a tensor that differs")
def takes_the_mean_of_means(ddp, parts):
    one_by_one(ddp, parts, lambda x: 1 / len(parts))


# ---- choose_buckets(nbytes, ready_us)

Solution("05.choose_buckets").slips("""
one_bucket: no less than with a single bucket
    return [len(nbytes)]
drops_the_remainder: which does not split 68 gradients into buckets
    return [10] * (len(nbytes) // 10)
returns_the_bytes: which does not split 68 gradients into buckets
    return nbytes
""")


@wrong("05.choose_buckets", "the ranks")
def differs_between_ranks(nbytes, ready_us):
    from labkit import Comm

    return [10, 58] if Comm().rank else [20, 48]
