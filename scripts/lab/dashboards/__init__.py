"""Grafana's dashboards, each described in a module of its own; `grafana` knows what Grafana wants to read.

`scripts/dashboards` writes them into `configs/grafana/`, and a test fails while those are stale.
"""
