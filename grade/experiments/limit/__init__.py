"""The GRADE paper (arXiv 2601.11574), whose conclusions ``notebooks/limit.ipynb`` judges."""
