"""How long compute threads spin: settled where the user has not."""

import pytest

from kvstore.engine.process.spawn import SPIN_COUNT, spin_briefly


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_what_the_user_says_counts(given, found):
    environment = dict(given)
    spin_briefly(environment)
    assert environment == found
