"""Fixtures and options for all tests: the pool of ranks, and ``--slow``."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch.distributed as dist

from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    # The same examples in every quick run: a red one is the fault of the change. The slow run looks for new ones.
    hypothesis.settings.register_profile("quick", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("slow", max_examples=1000, deadline=None)
    hypothesis.settings.load_profile("slow" if config.getoption("--slow") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A trainer or a mesh of one rank, in this process, makes one; the next test begins without."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Pools of ranks for ``ranks.run(world, fn, *args)``, shared by the whole run."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture
def borrowed_ranks(ranks: Ranks) -> type[Any]:
    """In place of ``Ranks`` in a tool: the pools of the tests, which stay up when the tool closes its own."""

    class Borrowed:
        run = staticmethod(ranks.run)

        def close(self) -> None:
            pass

    return Borrowed
