"""What NCCL says of itself with NCCL_DEBUG=INFO: the data (log.py), its parser, and a table of it.
examples/ has explained logs, composed after NCCL's documentation."""

from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode
from labkit.trace.nccl_log.parse import EXAMPLES, parse_nccl_log, read_nccl_log

__all__ = [
    "EXAMPLES", "Communicator", "Connection", "NcclLog", "NcclRank", "TreeNode", "parse_nccl_log",
    "read_nccl_log",
]  # fmt: skip
