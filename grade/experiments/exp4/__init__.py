"""Experiment 4: a training step of Qwen3-4B that ran out of memory (document 001)."""
