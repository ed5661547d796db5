"""What the experiment on scale measures."""
