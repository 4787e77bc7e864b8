"""Send and receive over sockets of our own: what gloo does underneath, to be read, and faster.

    rank 0   isend ─▶ Writer ══════ TCP ══════▶ Reader ─▶ the tensor of the irecv with this tag
                                                     └──▶ kept, until an irecv asks for it

    a message    │ group, 8 bytes │ tag, 8 │ length, 8 │ the bytes of the tensor

There is one connection for each pair of ranks and direction, whatever groups the two share, made
with the first message; where every rank listens, it told in the store at which all have met. What a
socket takes at once, the sender's own thread gives it; a thread of the writer gives it the rest.
The reader, a thread, takes out what comes, so that messages travel while both ends compute. It asks
for a whole tensor in one system call, where gloo's loop wakes up for every part of one.

A send is over when its bytes have left, so two ranks that both send first do not wait for each
other (over gloo and shared memory they do); a rank that is sent much before it asks for it needs
memory to keep it. After an error, a wait that was too long among them, all connections of a process
end, and those who wait for it hear of it at once.
"""

from labkit.comm.tcp.post import LOOPBACK, Post, TcpWire, own_host

__all__ = ["LOOPBACK", "Post", "TcpWire", "own_host"]
