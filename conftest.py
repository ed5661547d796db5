"""For every test, notebooks that nbval runs among them: no downloads, one thread, and no progress bars in outputs."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small: threads would mostly wait for each other
os.environ.setdefault("GRADE_PROGRESS", "0")  # what a published notebook holds too


def pytest_collection_modifyitems(items):
    """Skip the notebook beside TRL where TRL is not installed."""
    if find_spec("trl") is None:
        for item in items:
            if item.path.name == "beside_trl.ipynb":
                item.add_marker(pytest.mark.skip(reason="needs TRL: pip install -c constraints.txt -e '.[peers]'"))
