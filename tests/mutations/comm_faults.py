"""Deliberate faults of the communicator and its algorithms."""

import labkit.events as events
from harness import Change, Edit, instead
from labkit.comm.handle import Handle

IN_FULL = """        partial = incoming
    from labkit.comm.collectives.all_gather import ring_all_gather
    sums = [out if r == rank else x.clone() for r, x in enumerate(chunks)]
"""
FAULTS: dict[str, Change] = {
    label: Edit(label, f"labkit.{module}", old, new)
    for module, label, old, new in (
        ("comm.collectives.reduce_scatter", "skips a step",
         "for step in range(1, n):", "for step in range(1, n - 1):"),
        ("comm.collectives.reduce_scatter", "leaves partial sums in its input",
         "        partial = incoming\n", "        partial = share.copy_(incoming)\n"),
        ("comm.collectives.reduce_scatter", "is an all-reduce",  # as in gloo: twice the bytes
         "        partial = incoming\n    return sent_bytes\n",
         f"{IN_FULL}    return sent_bytes + (yield from ring_all_gather(wire, sums, tag))\n"),
        ("comm.collectives.reduce_scatter", "is an all-reduce and hides it",
         "        partial = incoming\n",
         f"{IN_FULL}    yield from ring_all_gather(wire, sums, tag)\n"),
        ("comm.collectives.all_reduce", "forgets the division", "own.div_(divide_by)", "pass"),
        ("comm.collectives.all_reduce", "divides twice",
         "own.div_(divide_by)", "own.div_(divide_by**2)"),
        ("comm.collectives.all_gather", "gathers in another order",
         "    yield from sends\n",
         "    yield from sends\n    if chunks[0].shape == chunks[-1].shape:\n"
         "        chunks[0][:], chunks[-1][:] = chunks[-1].clone(), chunks[0].clone()\n"),
        ("comm.collectives.all_gather", "gathers twice",
         "for step in range(n - 1):", "for step in range(2 * n - 2):"),
        ("comm.collectives.all_gather", "gathers twice and hides it",
         "        sends.append(wire.isend(outgoing, (rank + 1) % n, tag))\n",
         "        sends += [wire.isend(outgoing, (rank + 1) % n, tag) for _ in range(2)]\n"
         "        yield wire.irecv(incoming, (rank - 1) % n, tag)\n"),
        ("comm.collectives.all_gather", "counts half",
         "yield from sends\n    return sent_bytes", "yield from sends\n    return sent_bytes // 2"),
        ("comm.collectives.broadcast", "stops a round early",
         "while reach < n:", "while reach < n // 2:"),
        ("comm.collectives.broadcast", "sends all from the root",  # no more bytes, but all its own
         "    sent_bytes, reach = 0, 1\n",
         "    return (yield from flat_broadcast(wire, x, root, tag))\n"),
        ("comm.collectives.scatter", "scatters the first chunk to all",
         "wire.isend(chunks[r], r, tag)", "wire.isend(chunks[0], r, tag)"),
        ("comm.collectives.gather", "gathers the root's chunk only",
         "wire.irecv(chunks[r], r, tag)", "wire.irecv(chunks[r].clone(), r, tag)"),
        ("comm.collectives.all_to_all", "forgets the last peer",
         "wire.irecv(outs[behind], behind, tag)",
         "wire.irecv(outs[behind] if step < n - 1 else outs[behind].clone(), behind, tag)"),
        ("comm.collectives.ring_exchange", "returns its own tensor", "if n == 1:", "if n:"),
        ("comm.collectives.barrier", "is no barrier",
         "while distance < wire.size:", "while False:"),
        ("runtime.transports.send_receive", "keeps partial sums on all ranks",
         "own = x if at_root else x.clone()", "own = x"),
        ("runtime.dispatcher", "never copies back",  # into strided memory
         "finish.append(lambda: flat.copy_(copy.view(flat.shape)))", "pass"),
    )
}  # fmt: skip
FAULTS |= {
    label: instead(label, owner, name, new)
    for label, owner, name, new in (
        ("does not wait", Handle, "wait", lambda self: setattr(self, "_work", None)),
        ("counts other chunks",  # right only for sizes that divide
         events, "all_gather_bus_bytes", events.reduce_scatter_bus_bytes),
        ("counts the whole", events, "reduce_scatter_bus_bytes", lambda sizes, rank: sum(sizes)),
    )
}  # fmt: skip
