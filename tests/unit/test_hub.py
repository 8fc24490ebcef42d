"""Hub names: what is cached works without a network, what is not is refused in words."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.checkpoints import write_qwen3_5

from foreglance import Engine
from foreglance.models.base import ModelError
from foreglance.models.weights import find_model


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(hub: Path, name: str, revision: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """The folder of a cached model, in the layout of the hub's own cache."""
    root = hub / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    return root / "snapshots" / revision


def test_a_cached_hub_name_loads_without_a_network(hub_cache: Path, tmp_path: Path):
    checkpoint = write_qwen3_5(tmp_path / "made")
    shutil.copytree(checkpoint.folder, cached(hub_cache, "owner/tiny-model"))
    engine = Engine.load("owner/tiny-model")
    assert engine.target.head is not None


def test_a_hub_name_that_is_not_cached_is_refused_in_words(hub_cache: Path):
    with pytest.raises(ModelError, match=r"'owner/nothing' is not cached and cannot be downloaded") as error:
        find_model("owner/nothing")
    assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_one_line(hub_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    with pytest.raises(ModelError, match="not cached and cannot be downloaded") as error:
        find_model("owner/nothing")
    assert "\n" not in str(error.value) and "internet connection" not in str(error.value)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "nothing"])
def test_what_is_no_hub_name_is_never_looked_up(hub_cache: Path, name: str):
    with pytest.raises(ModelError, match="neither an embedded model"):
        find_model(name)
