"""Bias, variance and worth of gradient estimators."""
