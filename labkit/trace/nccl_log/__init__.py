"""What NCCL says of itself with NCCL_DEBUG=INFO, read into plain data.

log.py       the data: ranks, rings, trees, connections
parse.py     a log's text -> that data
summary.py   that data -> a table, and what deserves a second look
examples/    explained example lines, composed after NCCL's documentation
"""

from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode
from labkit.trace.nccl_log.parse import EXAMPLES, parse_nccl_log, read_nccl_log

__all__ = [
    "EXAMPLES", "Communicator", "Connection", "NcclLog", "NcclRank", "TreeNode", "parse_nccl_log",
    "read_nccl_log",
]  # fmt: skip
