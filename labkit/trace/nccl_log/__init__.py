"""A log of NCCL (NCCL_DEBUG=INFO) as plain data. No torch here. The explained example logs in
examples/ follow NCCL's documentation.

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
