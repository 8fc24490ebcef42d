"""Checkpoints and loaded targets, made once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checkpoints import Checkpoint, QwenSizes, write_qwen3_5

from foreglance.engine import Engine
from foreglance.models.registry import Loaded, load_model
from foreglance.prompt import Prompter
from foreglance.settings import Settings


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory) -> Callable[[QwenSizes], Checkpoint]:
    made: dict[QwenSizes, Checkpoint] = {}

    def get(sizes: QwenSizes) -> Checkpoint:
        if sizes not in made:
            made[sizes] = write_qwen3_5(tmp_path_factory.mktemp(f"qwen-{sizes.name}"), sizes)
        return made[sizes]

    return get


@pytest.fixture(scope="session")
def loaded_of(checkpoint_of) -> Callable[..., Loaded]:
    made: dict[tuple[QwenSizes, str], Loaded] = {}

    def get(sizes: QwenSizes, weights: str = "fp32") -> Loaded:
        if (sizes, weights) not in made:
            made[sizes, weights] = load_model(str(checkpoint_of(sizes).folder), Settings(weights=weights))
        return made[sizes, weights]

    return get


@pytest.fixture(scope="session")
def engine_of(loaded_of) -> Callable[..., Engine]:
    """A fresh engine on a shared target."""

    def get(sizes: QwenSizes, settings: Settings | None = None, weights: str = "fp32", target=None) -> Engine:
        loaded = loaded_of(sizes, weights)
        target = target or loaded.target
        prompter = Prompter(loaded.tokenizer, target.spec.image_token, target.spec.rule, target.prepare)
        return Engine(target, prompter, settings)

    return get
