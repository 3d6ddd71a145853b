"""Discovery of instances: sources are watched, added instances are awaited, and all are probed.

sources       the interface of sources, their kinds, and the configured instances
files         instances in files
dns_names     instances by DNS
kubernetes    instances by EndpointSlices
watcher       updates the roster from all sources
joining       adds instances of administrators as soon as they answer
prober        health probes, and questions to engines
facts         engines' answers to these questions
"""
