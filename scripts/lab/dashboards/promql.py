"""The shapes that the queries have. Several gateways are shown as one: their rates are added up."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Query, Variable

GATEWAY: Final = 'job=~"$job",instance=~"$instance"'
INSTANCES: Final = f'{GATEWAY},role=~"$role",address=~"$address"'
GENERATES: Final = 'api!~"models|tokenizer|pooling|sglang"'

JOB: Final = Variable("job", "Job", "pdproxy_build_info, job")
GATEWAYS: Final = Variable("instance", "Gateway", 'pdproxy_build_info{job=~"$job"}, instance')
ROLE: Final = Variable("role", "Role", f"pdproxy_instance_up{{{GATEWAY}}}, role")
ADDRESS: Final = Variable("address", "Instance", f'pdproxy_instance_up{{{GATEWAY},role=~"$role"}}, address')


def matching(*matchers: str) -> str:
    """Label matchers in one."""
    return ",".join(matcher for matcher in matchers if matcher)


def rate(metric: str, where: str = "", *, by: str = "", of: str = GATEWAY) -> str:
    """How fast a counter goes up in a second, for each value of the labels `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{matching(of, where)}}}[$__rate_interval]))"


def gauge(metric: str, where: str = "", *, by: str = "", of: str = GATEWAY, over: str = "sum") -> str:
    """Return a gauge, aggregated by `over`."""
    return f"{over}{f' by ({by})' if by else ''} ({metric}{{{matching(of, where)}}})"


def share(part: str, whole: str) -> str:
    """Return the ratio of a part to a whole, without data if the whole is 0."""
    return f"{part} / ({whole} > 0)"


def mean(histogram: str, *, by: str = "") -> str:
    """Return the mean of a histogram."""
    return share(rate(f"{histogram}_sum", by=by), rate(f"{histogram}_count", by=by))


def quantile(of: float, histogram: str, where: str = "", *, by: str = "") -> str:
    """Return a quantile, estimated within a bucket."""
    return f"histogram_quantile({of}, {rate(f'{histogram}_bucket', where, by=matching('le', by))})"


def percentiles(histogram: str, where: str = "") -> list[Query]:
    """Return queries for the percentiles 50, 95 and 99."""
    return [Query(quantile(percent / 100, histogram, where), f"p{percent}") for percent in (50, 95, 99)]


def buckets(histogram: str, where: str = "") -> list[Query]:
    """Return the counts of each bucket, for a heat map."""
    increase = f"increase({histogram}_bucket{{{matching(GATEWAY, where)}}}[$__rate_interval])"
    return [Query(f"sum by (le) ({increase})")]


_REFUSED: Final = rate("pdproxy_requests_total", matching('code=~"5.."', GENERATES))
_BROKEN: Final = rate("pdproxy_streams_broken_total", 'side!="client"')
FAILED: Final = f"(({_REFUSED} or vector(0)) + {_BROKEN})"
"""Requests that ended badly, and not by their client: with a 5xx, or with an answer that broke off."""
ERROR_SHARE: Final = share(FAILED, rate("pdproxy_requests_total", GENERATES))
