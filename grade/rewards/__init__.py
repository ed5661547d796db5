"""Reward models, the gold judge and verifiers."""
