"""What the notebooks call: a folder for each experiment."""
