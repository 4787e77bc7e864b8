import torch
import torch.nn.functional as F

from answers import wrong

# ---- average_gradients(comm, model)


@wrong("05.average_gradients", "rank 0's gradient of 0.weight is 2 × the right one")
def forgets_to_divide(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.grad)


@wrong("05.average_gradients", "on 3 ranks, rank 0's gradient of 0.weight is 1.5 × the right one")
def always_divides_by_two(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.grad.div_(2))


@wrong("05.average_gradients", "rank 0's gradient of 0.weight is not that of the global batch")
def averages_the_weights(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.detach().div_(comm.size))


@wrong("05.average_gradients", "rank 0 has other weights than before")
def averages_the_weights_too(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.grad.div_(comm.size))
        p.detach().mul_(0.9)


@wrong("05.average_gradients", "rank 0's gradient of 0.bias is not that of the global batch")
def only_the_matrices(comm, model):
    for p in model.parameters():
        if p.ndim > 1:
            comm.all_reduce(p.grad.div_(comm.size))


@wrong("05.average_gradients", "rank 0 calls 16 all-reduces")
def averages_twice(comm, model):
    for _ in range(2):
        for p in model.parameters():
            comm.all_reduce(p.grad.div_(comm.size))


@wrong("05.average_gradients", "the ranks disagree about collective")
def begins_elsewhere_on_each_rank(comm, model):
    parameters = list(model.parameters())
    for p in parameters[comm.rank :] + parameters[: comm.rank]:
        comm.all_reduce(p.grad.div_(comm.size))


# ---- average_in_buckets(comm, model, bucket_bytes)


def send(comm, gradients):
    flat = torch.cat([g.view(-1) for g in gradients]) / comm.size
    comm.all_reduce(flat)
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        g.copy_(part.view_as(g))


def fill(comm, parameters, bucket_bytes, send=send):
    filling = []
    for p in parameters:
        if filling and sum(g.nbytes for g in filling) + p.nbytes > bucket_bytes:
            send(comm, filling)
            filling = []
        filling.append(p.grad)
    send(comm, filling)


@wrong("05.average_in_buckets", "of 200 bytes, rank 0 sends 1 message, but 3 are right")
def one_bucket_for_everything(comm, model, bucket_bytes):
    send(comm, [p.grad for p in model.parameters()])


@wrong("05.average_in_buckets", "rank 0 sends 8 messages, but 3 are right")
def a_message_for_each(comm, model, bucket_bytes):
    for p in model.parameters():
        send(comm, [p.grad])


@wrong("05.average_in_buckets", "rank 0 fills them in another way")
def first_parameter_first(comm, model, bucket_bytes):
    fill(comm, model.parameters(), bucket_bytes)


@wrong("05.average_in_buckets", "rank 0 fills them in another way")
def in_a_larger_dtype(comm, model, bucket_bytes):
    def send_doubles(comm, gradients):
        flat = torch.cat([g.view(-1) for g in gradients]).double() / comm.size
        comm.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))

    fill(comm, reversed(list(model.parameters())), bucket_bytes, send_doubles)


@wrong("05.average_in_buckets", "is not that of the global batch")
def leaves_the_result_in_the_bucket(comm, model, bucket_bytes):
    def send_and_forget(comm, gradients):
        comm.all_reduce(torch.cat([g.view(-1) for g in gradients]) / comm.size)

    fill(comm, reversed(list(model.parameters())), bucket_bytes, send_and_forget)


@wrong("05.average_in_buckets", "rank 0's gradient of 0.weight is not that of the global batch")
def forgets_the_last_bucket(comm, model, bucket_bytes):
    filling = []
    for p in reversed(list(model.parameters())):
        if filling and sum(g.nbytes for g in filling) + p.nbytes > bucket_bytes:
            send(comm, filling)
            filling = []
        filling.append(p.grad)


# ---- Overlapped(comm, model)


class Hooked:
    def __init__(self, comm, model):
        self.comm, self.model, self.handles = comm, model, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.gradient_is_there)

    def gradient_is_there(self, p):
        p.grad.div_(self.comm.size)
        self.handles.append(self.comm.all_reduce(p.grad, async_op=True))

    def finish(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


@wrong("05.Overlapped", "rank 0 had asked for none of the 6 all-reduces")
class SendsWhenAllIsOver(Hooked):
    def gradient_is_there(self, p):
        pass

    def finish(self):
        for p in reversed(list(self.model.parameters())):
            self.comm.all_reduce(p.grad.div_(self.comm.size))


@wrong("05.Overlapped", "rank 0 stands still in 6 all-reduces during backward")
class BlocksInTheHook(Hooked):
    def gradient_is_there(self, p):
        self.comm.all_reduce(p.grad.div_(self.comm.size))


@wrong("05.Overlapped", "rank 0 has waited for 6 of its handles")
class WaitsAtOnce(Hooked):
    def gradient_is_there(self, p):
        super().gradient_is_there(p)
        self.handles[-1].wait()


@wrong("05.Overlapped", "returns before its all_reduce is over")
class NeverWaits(Hooked):
    def finish(self):
        self.handles.clear()


@wrong("05.Overlapped", "rank 0's gradient of 0.weight is 2 × the right one")
class ForgetsToDivide(Hooked):
    def gradient_is_there(self, p):
        self.handles.append(self.comm.all_reduce(p.grad, async_op=True))


@wrong("05.Overlapped", "had asked for 3 all-reduces")
class SendsTheMatricesEarly(Hooked):
    def gradient_is_there(self, p):
        if p.ndim > 1 or p.numel() == 3:
            super().gradient_is_there(p)

    def finish(self):
        super().finish()
        for p in self.model.parameters():
            if p.ndim == 1 and p.numel() != 3:
                self.comm.all_reduce(p.grad.div_(self.comm.size))


# ---- accumulate(ddp, parts)


@wrong("05.accumulate", "4 × what is needed")
def without_no_sync(ddp, parts):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (F.mse_loss(ddp(x), y) * len(x) / rows).backward()


def one_by_one(ddp, parts, weight):
    with ddp.no_sync():
        for x, y in parts[:-1]:
            (F.mse_loss(ddp(x), y) * weight(x)).backward()
    x, y = parts[-1]
    (F.mse_loss(ddp(x), y) * weight(x)).backward()


@wrong("05.accumulate", "rank 0's gradient of 0.weight is 4 × the right one")
def forgets_to_divide_by_the_parts(ddp, parts):
    one_by_one(ddp, parts, lambda x: 1)


@wrong("05.accumulate", "with parts of [4, 4, 4, 1] rows, rank 0's gradient of 0.weight is not")
def takes_the_mean_of_means(ddp, parts):
    one_by_one(ddp, parts, lambda x: 1 / len(parts))


@wrong("05.accumulate", "with parts of [3, 3, 3, 3] rows, rank 0's gradient of 0.weight is not")
def never_sends(ddp, parts):
    rows = sum(len(x) for x, _ in parts)
    with ddp.no_sync():
        for x, y in parts:
            (F.mse_loss(ddp(x), y) * len(x) / rows).backward()


@wrong("05.accumulate", "rank 0's gradient of 0.weight is not that of the global batch")
def keeps_the_last_part_only(ddp, parts):
    x, y = parts[-1]
    F.mse_loss(ddp(x), y).backward()


# ---- choose_buckets(nbytes, ready_us)


@wrong("05.choose_buckets", "no less than with one bucket for everything")
def everything_at_the_end(nbytes, ready_us):
    return [len(nbytes)]


@wrong("05.choose_buckets", "that does not cut 68 gradients into buckets")
def loses_the_rest(nbytes, ready_us):
    return [10] * (len(nbytes) // 10)


@wrong("05.choose_buckets", "that does not cut 68 gradients into buckets")
def returns_the_bytes(nbytes, ready_us):
    return nbytes


@wrong("05.choose_buckets", "the ranks")
def another_cut_each_time(nbytes, ready_us):
    from labkit import Comm

    return [10, 58] if Comm().rank else [20, 48]
