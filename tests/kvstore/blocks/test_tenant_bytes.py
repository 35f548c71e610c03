"""Bytes in all and by tenant: the sums agree, and a tenant that has none is not there."""

from kvstore.blocks.records import TenantBytes


def test_sums_by_tenant():
    found = TenantBytes()
    assert (found.total, found.of("anna")) == (0, 0)
    found.add("anna", 10)
    found.add("anna", 5)
    found.add("bert", 7)
    assert (found.total, found.of("anna"), found.of_tenants) == (22, 15, {"anna": 15, "bert": 7})
    found.add("anna", -15)
    found.add("nobody", 0)
    assert (found.total, found.of("anna"), found.of_tenants) == (7, 0, {"bert": 7})
    found.clear()
    assert (found.total, found.of_tenants) == (0, {})
