"""Methods trained side by side, at equal KL."""
