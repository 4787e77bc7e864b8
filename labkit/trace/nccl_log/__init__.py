"""An NCCL log (NCCL_DEBUG=INFO) as plain data, without importing torch. The annotated example logs
in examples/ follow NCCL's documentation.

NcclLog ── communicators ── Communicator    the ranks of one of torch's process groups
                              ranks         rank -> host, process and GPU
                              rings         channel -> ranks in ring order
                              trees         channel -> rank -> parent and children
                              connections   source, target, channel and transport
"""

from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode
from labkit.trace.nccl_log.parse import EXAMPLES, parse_nccl_log, read_nccl_log

__all__ = [
    "EXAMPLES", "Communicator", "Connection", "NcclLog", "NcclRank", "TreeNode", "parse_nccl_log",
    "read_nccl_log",
]  # fmt: skip
