"""Shared memory: how the ranks of a `World` on one machine move their CPU tensors.

Ranks are processes; over gloo, what one sends another goes through the kernel's sockets, in at
least two copies and some system calls. But memory can be mapped into several processes at once:

         rank 0                    the shared region                   rank 1
    +--------------+       +--------------------------------+     +--------------+
    |  x  ---------+-copy->|  words of 0   | words of 1     |<-copy-+------  x   |
    |              |       |  slots of 0   | slots of 1     |     |              |
    |  x  <--------+-copy--|  ring 0 -> 1  | ring 1 -> 0    |--copy-+----->  x   |
    +--------------+       +--------------------------------+     +--------------+

Three rules make it safe without any lock between the ranks:

    one writer      every word, slot and half ring is written by one rank only (and slice r of
                    symmetric memory, between two words, by rank r)
    data, then word a rank first writes the data, then a word that says it is there
    leave, then word data is not overwritten before all readers have said that they are done

    region.py       the file that all map, its words, and waiting for them
    slots.py        where each rank lays out pieces of its tensor: collectives go through them
    collectives.py  the collectives
    symmetric.py    tensors that all ranks reach, and that are reduced where they lie
    ring.py         a ring of bytes from one rank to another, and its two ends: send and receive
    transport.py    the transport that has all of it

What it costs: an all-reduce of S bytes copies (2n-1)/n S on each of n ranks, where the ring over
gloo sends 2(n-1)/n S through the kernel. What the others copy: collectives.py;
the bytes copied are the `wire_bytes` of its events. Of a tensor in symmetric memory, as a bucket of
gradients is, (n-1)/n S.
"""

from labkit.runtime.transports.shm.transport import Shared

__all__ = ["Shared"]
