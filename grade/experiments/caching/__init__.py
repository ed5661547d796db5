"""Activation caching (document 002)."""
