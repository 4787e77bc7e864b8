"""Where things stand that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PUBLISHED = ROOT / "tests" / "data" / "published"  # figures from papers, with their sources
