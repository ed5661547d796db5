"""Intuitor: self-certainty as a reward (document 004)."""
