"""The entropy probe on a language model (document 003)."""
