"""Grafana's dashboards, one module each; `grafana` defines the elements and their JSON.

`scripts/dashboards` writes them into `configs/grafana/`, and a test fails while those are stale.
"""
