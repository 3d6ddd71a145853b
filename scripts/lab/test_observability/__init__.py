"""Dashboards and alerts in front of a real Prometheus: every panel has something to show, and every alert fires.

prometheus   the program, its configuration with times that are shortened, and the questions one asks it
site         simulated engines, two gateways, and who asks them
faults       what goes wrong, under load and with a gateway itself
alerts       whether alerts tell of it, and what the queries of the dashboards gave; picture: drawn
"""
