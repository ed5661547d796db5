"""Rewards distilled from scored completions in closed form, and their gradients."""
