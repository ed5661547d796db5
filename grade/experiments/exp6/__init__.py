"""Experiment 6: GRADE that fits in memory (document 000)."""
