"""What NCCL says of itself with NCCL_DEBUG=INFO, read into plain data (no torch here).

    NcclLog ── communicators ── Communicator    the ranks of one of torch's process groups
                                  ranks         the host and GPU of each
                                  rings         channel -> the ranks in the order of its ring
                                  trees         channel -> rank -> its parent and its children
                                  connections   source, target, channel and transport

A *channel* is one ring and one tree, with some of the GPU's threads and a share of the bytes: NCCL
runs several at once to fill all links. summary.py makes a table of a log; examples/ has explained
ones, composed after NCCL's documentation.

A line begins with its process, and the lines of all ranks are mixed. Other lines are skipped:

    node0:4100:4131 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
    host  process thread  CUDA device

The forms here are those of NCCL 2.8 to 2.27. Source: NCCL's documentation, "Environment Variables"
(NCCL_DEBUG), and NCCL's source, which has each line's format (src/debug.cc, src/init.cc,
src/graph/rings.cc, src/transport/).
"""

from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode
from labkit.trace.nccl_log.parse import EXAMPLES, parse_nccl_log, read_nccl_log

__all__ = [
    "EXAMPLES", "Communicator", "Connection", "NcclLog", "NcclRank", "TreeNode", "parse_nccl_log",
    "read_nccl_log",
]  # fmt: skip
