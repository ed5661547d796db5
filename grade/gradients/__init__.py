"""Gradients of a reward through sampled text: estimators, engines, losses and policy gradients."""
