"""One server with the embedded model for all tests of this folder that need no settings of their own."""

import pytest
from support.disks import small_disk
from support.served import serving

from foreglance import Engine, Settings


@pytest.fixture(scope="session")
def engine():
    return Engine.load("tiny-qwen", Settings(weights="fp32", slots=4, try_drafts=False))


@pytest.fixture(scope="session")
def served(engine):
    with serving(engine) as running:
        yield running


@pytest.fixture
def client(served):
    """After a test nothing may be left of its requests."""
    with served.openai() as client:
        yield client
    served.settle()


@pytest.fixture
def disk(tmp_path):
    """A folder that takes four megabytes."""
    with small_disk(tmp_path / "disk", 4 << 20) as folder:
        yield folder
