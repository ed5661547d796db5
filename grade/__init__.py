"""Reward gradients through generated text."""
