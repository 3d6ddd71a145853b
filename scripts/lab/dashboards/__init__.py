"""Grafana's dashboards, one module each. `grafana` defines the model, and `scripts/dashboards` writes the files."""
