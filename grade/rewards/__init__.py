"""Reward functions, reward models and the gold judge."""
