"""What NCCL says of itself with NCCL_DEBUG=INFO, read into plain data (no torch here).

log.py       the data: communicators, ranks, connections; what a channel is
parse.py     a log's text -> that data; what a line looks like
summary.py   that data -> a table, and what deserves a second look
examples/    explained example lines, composed after NCCL's documentation

NcclLog ── communicators ── Communicator    the ranks of one of torch's process groups
                              ranks         the host and GPU of each
                              rings         channel -> the ranks in the order of its ring
                              trees         channel -> rank -> its parent and its children
                              connections   source, target, channel and transport
"""

from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode
from labkit.trace.nccl_log.parse import EXAMPLES, parse_nccl_log, read_nccl_log

__all__ = [
    "EXAMPLES", "Communicator", "Connection", "NcclLog", "NcclRank", "TreeNode", "parse_nccl_log",
    "read_nccl_log",
]  # fmt: skip
