"""Beyond one GPU and one engine: a divided base, its memory, settings that fit, samples from other engines."""
