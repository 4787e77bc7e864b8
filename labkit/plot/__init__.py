"""Pictures: the same thing in the same colour, everywhere."""
