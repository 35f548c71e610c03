"""Fixtures of the tests of kvstore's own modules."""

import pytest

from tests.support.store.host import Host


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts on one directory, which are closed at the end."""
    opened = []

    def make(**options):
        opened.append(Host(tmp_path / "store", **options))
        return opened[-1]

    yield make
    for host in opened:
        host.close()
