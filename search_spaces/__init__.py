"""One YAML file per sweep; its first line is the command that runs it. `tables/` holds the papers' tables."""
