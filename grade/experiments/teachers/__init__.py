"""Students of a teacher: divergence by method, beside rewards and beside TRL."""
