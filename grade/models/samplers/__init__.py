"""Who samples the completions: this package, in two ways, transformers' continuous batching, or a server."""
