"""What the experiment with the probe measures; nothing here knows a figure."""
