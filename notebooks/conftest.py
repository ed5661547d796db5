"""What nbval leaves out."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items):
    """Skip the notebook beside TRL where TRL is not installed."""
    if find_spec("trl") is None:
        for item in items:
            if item.path.name == "beside_trl.ipynb":
                item.add_marker(pytest.mark.skip(reason="needs TRL: pip install -c constraints.txt -e '.[peers]'"))
