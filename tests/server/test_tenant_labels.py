"""Labels of tenants: the most active ones have their own, and their number is bounded."""

from __future__ import annotations

from random import Random

from rootstock.server.access.tenant_labels import OTHERS, TenantLabels, shown_tenant


def test_the_first_tenants_get_labels_and_later_ones_are_others() -> None:
    labels = TenantLabels(2, drop=lambda label: None)
    assert [labels.label(tenant) for tenant in ("a", "b", "c", "a", "", "d")] == [
        "a",
        "b",
        OTHERS,
        "a",
        "",
        OTHERS,
    ]


def test_a_tenant_with_more_requests_takes_the_label_of_the_least_active_one() -> None:
    dropped: list[str] = []
    labels = TenantLabels(2, drop=dropped.append)
    for tenant in ("often", "rare", "often", "often"):
        labels.label(tenant)
    assert [labels.label("new") for _ in range(3)] == [OTHERS, "new", "new"]
    assert dropped == ["rare"]
    assert labels.label("often") == "often"
    assert labels.label("rare") == OTHERS, "it lost its label, and its requests still count"


def test_invented_tenants_get_no_label_and_take_none() -> None:
    random, dropped = Random(0), list[str]()
    labels = TenantLabels(5, drop=dropped.append)
    regular = [f"tenant {number}" for number in range(5)]
    for tenant in regular * 2:
        labels.label(tenant)
    found = {labels.label(f"invented {random.random()}") for _ in range(10_000)}
    assert found == {OTHERS}
    assert not dropped
    assert {labels.label(tenant) for tenant in regular} == set(regular)


def test_a_regular_tenant_is_found_among_invented_ones() -> None:
    random, dropped = Random(0), list[str]()
    labels = TenantLabels(2, drop=dropped.append)
    for _ in range(3):
        labels.label("first")
        labels.label("second")
    shown = ""
    for _ in range(20):
        shown = labels.label("regular")
        for _ in range(3):
            labels.label(f"invented {random.random()}")
    assert shown == "regular"
    assert len(dropped) == 1


def test_without_labels_every_tenant_is_one_of_the_others() -> None:
    labels = TenantLabels(0, drop=lambda label: None)
    assert [labels.label(tenant) for tenant in ("a", "", "a")] == [OTHERS, "", OTHERS]


def test_a_tenant_of_a_key_is_shown_and_one_that_a_header_names_is_hashed() -> None:
    assert shown_tenant("acme", "") == "acme"
    assert shown_tenant("acme", "other") == "acme", "the key decides"
    assert shown_tenant("", "") == ""
    named = shown_tenant("", "a secret salt")
    assert named.startswith("sha256:")
    assert len(named) == 19
    assert named == shown_tenant("", "a secret salt") != shown_tenant("", "another")
    assert shown_tenant("", "\ud800").startswith("sha256:"), "a header may hold any text"
