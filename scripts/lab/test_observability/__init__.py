"""scripts/test-observability: every panel has data, and every alert fires, in a real Prometheus.

site     simulated engines, two gateways, and clients
  faults   faults under load, and of an idle gateway
  alerts   Prometheus with shortened times, queries of dashboards and the course of alerts
  picture  panels as SVG
"""
