"""What the validation measures; nothing here knows a figure."""
