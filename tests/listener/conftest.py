"""The application around which a listener stands is served as that of the APIs is."""

from tests.api.conftest import gateway

__all__ = ["gateway"]
