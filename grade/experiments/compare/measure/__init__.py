"""What the comparison measures; nothing here knows a figure."""
