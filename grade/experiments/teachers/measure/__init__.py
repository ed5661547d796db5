"""Measurements: tables from settings. Nothing here knows a figure or a claim."""
