"""Fixtures and options for all tests: the pool of ranks, and ``--slow``."""

from collections.abc import Iterator

import pytest

from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Pools of ranks for ``ranks.run(world, fn, *args)``, shared by the whole run."""
    pools = Ranks()
    yield pools
    pools.close()
