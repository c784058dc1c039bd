"""One YAML file per sweep; its first line is the command that runs it."""
