"""What the sampler promises, with a real engine; without one (`make engines`) none of these tests is collected."""

import pytest
from vllm_server import PYTHON, Engine, save_base

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Makes servers; none outlives the tests."""
    made = []

    def engine() -> Engine:
        made.append(Engine(tmp_path_factory.mktemp("engine") / "log"))
        return made[-1]

    yield engine
    for each in made:
        each.kill()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A base whose own defaults are not the policy: they are what a server falls back on."""
    defaults = dict(temperature=0.3, top_k=5, top_p=0.5, repetition_penalty=1.5, max_new_tokens=8, do_sample=True)
    return save_base(tmp_path_factory.mktemp("base"), defaults=defaults)


@pytest.fixture(scope="session")
def engine(engines, base):
    """A server of that base, which takes its defaults from it."""
    made = engines()
    made.start(base)
    return made
