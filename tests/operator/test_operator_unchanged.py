"""What counts as a change of an object in the cluster."""

import pytest

from dpi_operator.plan.reconcile import contains


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"a": 1, "added": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"publishNotReadyAddresses": False, "ports": [], "labels": {}, "note": "", "count": 0}, True),
        ({}, {"publishNotReadyAddresses": True}, False),
        ({"enabled": True}, {"enabled": False}, False),
        ({"ports": [{"port": 1, "nodePort": 3}]}, {"ports": [{"port": 1}]}, True),
        ({"ports": [{"port": 1}, {"port": 2}]}, {"ports": [{"port": 1}]}, False),
    ],
)
def test_what_the_api_server_adds_or_leaves_out_is_no_change(live, wanted, same):
    assert contains(live, wanted) is same
