"""What is measured of gradient estimators; nothing here knows a figure."""
