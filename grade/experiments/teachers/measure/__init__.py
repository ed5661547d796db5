"""What the experiment measures; nothing here knows a figure."""
