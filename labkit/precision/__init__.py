"""Numbers of fewer bits, and what keeps training with them right."""
