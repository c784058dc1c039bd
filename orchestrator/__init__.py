"""The engine: knows no algorithm by name."""
