"""The command line, one file for each topic. A command imports what it needs when it runs, so that
`--help` is immediate.
"""

from importlib import import_module

from labkit.cli.terminal import app

# The help lists the commands in this order.
for name in ("train", "doctor", "runs", "schedule", "nccl_log", "plan", "bench"):
    import_module(f"labkit.cli.{name}")


def main() -> None:
    """Entry of the command `labkit`."""
    app()
