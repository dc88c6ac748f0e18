"""Tests here that need an engine's packages skip without them. Two processes run the engines of all tests."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from connector_rig import SEEDS, Engine, closing


@pytest.fixture(scope="session")
def where(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(where: pathlib.Path) -> pathlib.Path:
    import connector_model

    connector_model.write(where / "tiny")
    return where / "tiny"


@pytest.fixture(scope="session")
def one_process(where: pathlib.Path) -> Iterator[Engine]:
    engine = Engine(where / "one.log")
    with closing(engine):
        yield engine


@pytest.fixture(scope="session")
def other_process(where: pathlib.Path) -> Iterator[Engine]:
    engine = Engine(where / "other.log")
    with closing(engine):
        yield engine


@pytest.fixture(scope="session")
def want(one_process: Engine, model: pathlib.Path) -> dict[int, list[int]]:
    """Each prompt's tokens from an engine without a connector."""
    one_process.start(model)
    return {seed: one_process.generate(seed)["tokens"][0] for seed in SEEDS}


@pytest.fixture
def engine(one_process: Engine) -> Iterator[Engine]:
    """A process in which a test starts engines."""
    yield one_process
    one_process.stop()


@pytest.fixture
def second(other_process: Engine) -> Iterator[Engine]:
    """Another one."""
    yield other_process
    other_process.stop()
