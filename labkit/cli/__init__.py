"""The command line, one file per topic. A command imports its dependencies when it runs, so that
`--help` is immediate.
"""

from importlib import import_module

from labkit.cli.terminal import app

# The help lists the commands in this order.
for name in ("train", "doctor", "runs", "schedule", "nccl_log", "plan", "bench"):
    import_module(f"labkit.cli.{name}")


def main() -> None:
    """Entry point of the `labkit` command."""
    app()
