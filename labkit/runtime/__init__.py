"""The runtime: the communication behind a `Comm`, and the processes that are its ranks.

process_context, board, clock, dispatcher, transports    carry out operations
world, ranks, launch, server, rank, attach               start, run and stop rank processes
failures, diagnose, in_step, errors                      detect and report failures
"""

import labkit.comm  # noqa: F401  imports modules of this package, so must be imported first
