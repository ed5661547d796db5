"""Profiles on top of DVC, and papermill that refuses unknown parameters."""
