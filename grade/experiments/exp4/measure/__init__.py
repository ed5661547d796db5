"""What the experiment measures: configurations of a step, and their tables."""
