"""For every test, notebooks that nbval runs among them: no downloads, one thread, and no progress bars in outputs."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small: threads would mostly wait for each other
os.environ.setdefault("GRADE_PROGRESS", "0")  # what a published notebook holds too
