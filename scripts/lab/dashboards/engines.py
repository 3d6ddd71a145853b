"""The engines' metrics beside the gateway's view of them.

Prometheus must scrape the engines under the addresses that the gateway uses.
"""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from lab.dashboards.promql import GATEWAYS, JOB, gauge, matching, quantile

_JOB: Final = Variable(
    "engine_job", "Engines' job", '{__name__=~"vllm:num_requests_running|sglang:num_running_reqs"}, job'
)
_ENGINE: Final = Variable(
    "engine",
    "Engine",
    '{__name__=~"vllm:num_requests_running|sglang:num_running_reqs",job=~"$engine_job"}, instance',
)
_ENGINES: Final = 'job=~"$engine_job",instance=~"$engine"'
_EACH: Final = "{{instance}}"


def _sum(metric: str) -> str:
    return f"sum by (instance) ({metric}{{{_ENGINES}}})"


def _rate(metric: str, where: str = "", by: str = "instance") -> str:
    return f"sum by ({by}) (rate({metric}{{{matching(_ENGINES, where)}}}[$__rate_interval]))"


def _p95(histogram: str) -> str:
    return f"histogram_quantile(0.95, {_rate(f'{histogram}_bucket', by='le, instance')})"


_RUNNING: Final = f"({_sum('vllm:num_requests_running')} or {_sum('sglang:num_running_reqs')})"
_WAITING: Final = f"({_sum('vllm:num_requests_waiting')} or {_sum('sglang:num_queue_reqs')})"
_KV_USED: Final = f"({_sum('vllm:kv_cache_usage_perc')} or {_sum('sglang:token_usage')})"
_COUNTED: Final = gauge("pdproxy_instance_inflight", by="address")
_COUNTED_AS_ENGINES: Final = f'label_replace({_COUNTED}, "instance", "$1", "address", "(.*)")'
_DECODED: Final = _rate("sglang:realtime_tokens_total", 'mode="decode"')

_LOAD: Final = Row(
    "Load",
    [
        Panel(
            title="Running",
            description="Requests that each engine runs (vllm:num_requests_running, sglang:num_running_reqs).",
            unit="none",
            queries=[Query(_RUNNING, _EACH)],
        ),
        Panel(
            title="Waiting in engines",
            description="Requests in the queue of each engine (vllm:num_requests_waiting, "
            "sglang:num_queue_reqs). If engines queue requests for a long time, set "
            "admission.max_running_prefill and max_running_decode to their limits. The gateway "
            "can still choose another instance for requests in its own queue.",
            unit="none",
            queries=[Query(_WAITING, _EACH)],
            runbook="concepts/overload.md#overload",
        ),
        Panel(
            title="KV cache in use",
            description="Used share of each engine's KV cache (vllm:kv_cache_usage_perc, sglang:token_usage). "
            "Near 1, decoders preempt requests or ask for recomputation.",
            unit="percentunit",
            highest=1,
            queries=[Query(_KV_USED, _EACH)],
            runbook="concepts/resume.md#how-it-works",
        ),
        Panel(
            title="The gateway's count less the engine's",
            description="Requests in flight as counted by the gateway (pdproxy_instance_inflight) minus the "
            "running and waiting requests of the engine. Near 0: both agree. Persistently below "
            "0: the engine serves other clients. Persistently above 0: requests are in transit or "
            "in the engine's frontend.",
            unit="none",
            width=12,
            lowest=None,
            queries=[Query(f"{_COUNTED_AS_ENGINES} - on (instance) ({_RUNNING} + {_WAITING})", _EACH)],
        ),
        Panel(
            title="Engines that Prometheus reaches",
            description="1 if Prometheus scrapes the engine (up). If the gateway reports an instance as up "
            "and Prometheus does not, its metrics route is disabled or not reachable.",
            unit="none",
            width=12,
            highest=1,
            queries=[Query(f"up{{{_ENGINES}}}", _EACH)],
        ),
    ],
)

_WORK: Final = Row(
    "Work",
    [
        Panel(
            title="Prompt tokens",
            description="Prompt tokens processed per second by each engine (vllm:prompt_tokens_total, "
            "sglang:prompt_tokens_total). Decoders also count prompts whose KV cache they loaded.",
            unit="short",
            queries=[Query(f"{_rate('vllm:prompt_tokens_total')} or {_rate('sglang:prompt_tokens_total')}", _EACH)],
        ),
        Panel(
            title="Generated tokens",
            description="Tokens per second that each engine generated (vllm:generation_tokens_total, "
            'sglang:realtime_tokens_total{mode="decode"}).',
            unit="short",
            queries=[Query(f"{_rate('vllm:generation_tokens_total')} or {_DECODED}", _EACH)],
        ),
        Panel(
            title="Where prompts' KV came from (vLLM)",
            description="Prompt tokens per second that were computed, found in the cache, or loaded from a "
            "prefiller (vllm:prompt_tokens_by_source_total). Decode instances should load KV, not "
            "compute it. A high computed share means that the handoff is broken.",
            unit="short",
            queries=[
                Query(_rate("vllm:prompt_tokens_by_source_total", by="instance, source"), "{{instance}} {{source}}")
            ],
            runbook="troubleshooting/alerts.md#pdproxykvcomputedagain",
        ),
        Panel(
            title="Prefix cache hits (vLLM)",
            description="Share of prompt tokens found in each engine's own cache (vllm:prefix_cache_hits_total over "
            "vllm:prefix_cache_queries_total).",
            unit="percentunit",
            highest=1,
            queries=[
                Query(
                    f"{_rate('vllm:prefix_cache_hits_total')} / ({_rate('vllm:prefix_cache_queries_total')} > 0)", _EACH
                )
            ],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Preemptions (vLLM)",
            description="Preempted requests per second (vllm:num_preemptions_total). The KV cache is too "
            "small for the running requests.",
            unit="ops",
            queries=[Query(_rate("vllm:num_preemptions_total"), _EACH)],
        ),
        Panel(
            title="First token, p95: gateway and engines (vLLM)",
            description="Time to first token as seen by clients (pdproxy_time_to_first_token_seconds), and as "
            "reported by each engine (vllm:time_to_first_token_seconds).",
            unit="s",
            queries=[
                Query(quantile(0.95, "pdproxy_time_to_first_token_seconds"), "gateway"),
                Query(_p95("vllm:time_to_first_token_seconds"), _EACH),
            ],
        ),
    ],
)

ENGINES: Final = Dashboard(
    name="engines",
    title="pdproxy / Engines beside the gateway",
    description="Metrics of vLLM and SGLang next to the gateway's view of the engines.",
    variables=[JOB, GATEWAYS, _JOB, _ENGINE],
    rows=[_LOAD, _WORK],
)
