"""The traits of a connector agree with the connector itself."""

from __future__ import annotations

from proxy.connectors import CONNECTORS
from proxy.settings import CONNECTOR_TRAITS


def test_every_connector_has_traits_under_its_name() -> None:
    assert CONNECTOR_TRAITS.keys() - CONNECTORS.keys() == {"auto"}
    assert CONNECTORS.keys() <= CONNECTOR_TRAITS.keys()


def test_connector_passes_on_what_another_one_names() -> None:
    for traits in CONNECTOR_TRAITS.values():
        assert set(traits.passes_on) <= CONNECTORS.keys()
