"""What the experiment measures: one layer, the options traced and run, and their tables."""
