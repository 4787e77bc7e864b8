"""What of a model's parameters this rank owns: see labkit/precision/pieces.py, which master weights
share with the strategies.
"""

from labkit.precision.pieces import OwnedPiece

__all__ = ["OwnedPiece"]
