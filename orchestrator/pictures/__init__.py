"""Pictures for papers, of a run (run.py) and of a comparison (comparison.py), in one style (style.py)."""
