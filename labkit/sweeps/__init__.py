"""Times of collectives by size (sweep.py), and the model fitted to them (alpha_beta.py)."""
