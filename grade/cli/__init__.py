"""The command line: ``python -m grade <command>``."""
