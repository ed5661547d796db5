"""What the experiment on Intuitor measures; nothing here knows a figure."""
