"""Instances that Kubernetes knows of: the endpoints of services, as its EndpointSlices name them."""

from proxy.fleet.discovery.kubernetes.watched_slices import WatchedSlices, watched_slices

__all__ = ["WatchedSlices", "watched_slices"]
