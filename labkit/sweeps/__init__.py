"""Times of collectives over sizes (sweep.py), and the model fitted to them (alpha_beta.py)."""
