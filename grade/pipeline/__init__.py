"""Papermill that refuses unknown parameters."""
