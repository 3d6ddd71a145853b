"""Dashboards and alerts in front of a real Prometheus: every panel has something to show, and every alert fires.

prometheus   the program, its configuration with times that are shortened, and the questions one asks it
site         simulated engines, two gateways, and who asks them
faults       what goes wrong, under load and with a gateway itself; alerts: whether they tell of it
panels       the queries of the dashboards, and what they gave; picture: drawn
"""
