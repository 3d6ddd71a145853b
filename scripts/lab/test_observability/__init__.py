"""Dashboards and alerts in front of a real Prometheus: every panel has something to show, and every alert fires.

prometheus   the program, its configuration with times that are shortened, and the questions one asks it
fleet        simulated engines and two gateways; traffic: who asks them
faults       what goes wrong, under load and with a gateway itself, and which alerts tell of it; alerts: whether they do
panels       the queries of the dashboards, and what they gave; picture: drawn
"""
