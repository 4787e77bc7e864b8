"""Shared memory: how the ranks of a `World` on one machine move their CPU tensors.

Over gloo, a message between two processes passes through the kernel's sockets, with at least two
copies and several system calls. But memory can be mapped into several processes at once:

         rank 0                    the shared region                   rank 1
    +--------------+       +--------------------------------+     +--------------+
    |  x  ---------+-copy->|  words of 0   | words of 1     |<-copy-+------  x   |
    |              |       |  slots of 0   | slots of 1     |     |              |
    |  x  <--------+-copy--|  ring 0 -> 1  | ring 1 -> 0    |--copy-+----->  x   |
    +--------------+       +--------------------------------+     +--------------+

Three rules make this safe without any lock between the ranks:

    one writer      each word, slot and ring is written by one rank only (and slice r of symmetric
                    memory, between two announcements, by rank r)
    data, then word a rank writes the data first, then the word that announces it
    leave, then word data is overwritten only after all readers have announced that they are done

    region.py       the mapped file, its words, and waits on words
    slots.py        where each rank puts pieces of its tensor for collectives
    collectives.py  the collectives
    symmetric.py    tensors in memory that all ranks can access, reduced in place
    ring.py         a ring of bytes from one rank to another: send and receive
    transport.py    the transport built on these modules

An all-reduce of S bytes copies (2n-1)/n S on each of n ranks, or (n-1)/n S in symmetric memory
(gradient buckets); the ring over gloo sends 2(n-1)/n S through the kernel. For other collectives,
see collectives.py. An event's `wire_bytes` are the bytes copied.
"""

from labkit.runtime.transports.shm.transport import Shared

__all__ = ["Shared"]
