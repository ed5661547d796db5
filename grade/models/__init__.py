"""The frozen base, its adapter, prompts, sampling and scores: what every method shares."""
