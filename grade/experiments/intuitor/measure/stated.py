"""Figures that document 004 states: its scaling table and its settings."""

STATED_GB = {2048: (8, 160), 4096: (13, 320), 6144: (18, 480), 8192: (23, 640)}
"""The document's scaling table: tokens to GB of PPO and of Intuitor."""

SETTINGS = {"conservative": (8, 0), "aggressive": (32, 1)}
"""The document's settings for eight GPUs: sequences per GPU, and which of two response lengths."""
