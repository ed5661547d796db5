"""Teachers: divergences, what they cost in memory, and hints that help to learn from answers that can be checked."""
