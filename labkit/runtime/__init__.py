"""The machinery: what moves a `Comm`'s bytes, and what brings ranks to life.

process_context, board, clock, dispatcher, transports    how an operation is carried out
world, ranks, launch, server, rank, attach               processes that are ranks
failures, diagnose, in_step, errors                      what went wrong in a run
"""

import labkit.comm  # noqa: F401  which stands on some modules here, and comes first
