"""Dashboard of the stages between prefillers and decoders, and of the KV handoff."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Dashboard, Panel, Query, Row
from lab.dashboards.promql import (
    ADDRESS,
    GATEWAYS,
    INSTANCES,
    JOB,
    ROLE,
    buckets,
    gauge,
    matching,
    mean,
    percentiles,
    quantile,
    rate,
    share,
)

_STAGE: Final = "pdproxy_stage_duration_seconds"
_MEANING: Final = (
    "queue: waiting for room; encode: media; prefill: until the prefiller has answered; handoff: until the decoder's "
    "status line; first_token: until its first token; stream: the rest"
)
_PROMPT: Final = rate("pdproxy_tokens_total", 'kind="prompt"')
_CACHED: Final = rate("pdproxy_tokens_total", 'kind="cached"')
_TOLD: Final = rate("pdproxy_handovers_total", 'result!="unknown"')
_COMPUTED: Final = rate("pdproxy_handovers_total", 'result="computed"')


_TIME: Final = Row(
    "Where the time goes",
    [
        Panel(
            title="Mean time by stage",
            description=f"Average time of a request in each stage ({_STAGE}). {_MEANING}.",
            unit="s",
            queries=[Query(mean(_STAGE, by="stage"), "{{stage}}")],
            stacked=True,
        ),
        Panel(
            title="p95 by stage",
            description=f"95th percentile of the time in each stage ({_STAGE}). {_MEANING}.",
            unit="s",
            queries=[Query(quantile(0.95, _STAGE, by="stage"), "{{stage}}")],
        ),
        Panel(
            title="Before the first token, by stage",
            description="Share of each stage in the time to first token. Mostly queue: too few instances, or "
            "limits too low. Mostly prefill: add prefillers, or improve the prefix cache. Mostly "
            "handoff and first_token: slow KV transfer, or saturated decoders "
            f"({_STAGE}).",
            unit="percentunit",
            highest=1,
            stacked=True,
            queries=[
                Query(
                    rate(f"{_STAGE}_sum", 'stage!="stream"', by="stage")
                    + " / scalar("
                    + rate(f"{_STAGE}_sum", 'stage!="stream"')
                    + " > 0)",
                    "{{stage}}",
                )
            ],
        ),
        Panel(
            title="Prefill, how many took how long",
            description=f"Distribution of the prefill time ({_STAGE}).",
            kind="heatmap",
            unit="s",
            lowest=None,
            queries=buckets(_STAGE, 'stage="prefill"'),
        ),
        Panel(
            width=8,
            title="Prefill",
            description=f"Time until the prefiller has answered ({_STAGE}).",
            unit="s",
            queries=percentiles(_STAGE, 'stage="prefill"'),
        ),
        Panel(
            width=8,
            title="Hand-over and first token",
            description="From the prefiller's answer to the decoder's status line, and from there to its first "
            f"token: together the KV transfer and the decoder's own queue ({_STAGE}).",
            unit="s",
            queries=[
                Query(quantile(0.5, _STAGE, 'stage=~"handoff|first_token"', by="stage"), "{{stage}} p50"),
                Query(quantile(0.95, _STAGE, 'stage=~"handoff|first_token"', by="stage"), "{{stage}} p95"),
            ],
            runbook="troubleshooting/alerts.md#pdproxykvcomputedagain",
        ),
        Panel(
            width=8,
            title="Streaming",
            description=f"Time from the first token to the end of the answer ({_STAGE}).",
            unit="s",
            queries=percentiles(_STAGE, 'stage="stream"'),
        ),
    ],
    width=12,
)

_TOKENS: Final = Row(
    "Tokens",
    [
        Panel(
            title="Prompt tokens",
            description="Prompt tokens per second, and prompt tokens found in the prefix cache of engines "
            "(pdproxy_tokens_total).",
            unit="short",
            queries=[Query(_PROMPT, "prompt"), Query(_CACHED, "cached")],
        ),
        Panel(
            title="Found in the prefix cache",
            description="Share of prompt tokens found in the prefix cache of engines (pdproxy_tokens_total). "
            "If empty, engines do not report it: start them with --enable-prompt-tokens-details "
            "(vLLM) or --enable-cache-report (SGLang).",
            unit="percentunit",
            highest=1,
            queries=[Query(share(_CACHED, _PROMPT), "cached")],
            runbook="concepts/routing.md#routing",
        ),
        Panel(
            title="Generated tokens",
            description="Generated tokens per second (pdproxy_tokens_total).",
            unit="short",
            queries=[Query(rate("pdproxy_tokens_total", 'kind="completion"'), "generated")],
        ),
        Panel(
            title="Tokens per request",
            description="Mean number of tokens of prompts and answers (pdproxy_tokens_total over "
            "pdproxy_request_end_total).",
            unit="short",
            width=12,
            queries=[
                Query(share(rate("pdproxy_tokens_total", f'kind="{kind}"'), rate("pdproxy_request_end_total")), kind)
                for kind in ("prompt", "completion")
            ],
        ),
        Panel(
            title="Prompts without a prefill leg",
            description="Prompts per second that a decoder computed without a prefiller "
            "(pdproxy_prefills_skipped_total, kv.prefill_min_tokens, kv.skip_prefill).",
            unit="reqps",
            width=12,
            queries=[Query(rate("pdproxy_prefills_skipped_total"), "skipped")],
        ),
    ],
)

_KV: Final = Row(
    "KV cache handed over",
    [
        Panel(
            title="Hand-overs",
            description="KV handoffs per second, by the result in the decoders' metrics "
            "(pdproxy_handovers_total): transferred, recomputed, or unknown.",
            unit="ops",
            queries=[Query(rate("pdproxy_handovers_total", by="result"), "{{result}}")],
            stacked=True,
            runbook="troubleshooting/alerts.md#pdproxykvcomputedagain",
        ),
        Panel(
            title="Computed once more",
            description="Share of handoffs after which the decoder recomputed the prompt, among those with a "
            "known result (pdproxy_handovers_total).",
            unit="percentunit",
            highest=1,
            queries=[Query(share(_COMPUTED, _TOLD), "computed again")],
            thresholds={0.05: "red"},
            runbook="troubleshooting/alerts.md#pdproxykvcomputedagain",
        ),
        Panel(
            title="Prefills without KV parameters",
            description="Prefill answers without KV parameters, per second, by the next action "
            "(pdproxy_missing_kv_total).",
            unit="ops",
            queries=[Query(rate("pdproxy_missing_kv_total", by="action"), "{{action}}")],
            runbook="troubleshooting/alerts.md#pdproxyinstancemisfit",
        ),
        Panel(
            title="Orphaned KV caches",
            description="Orphaned KV caches per second, which no decoder fetched, and results of their "
            "release (pdproxy_kv_orphans_total, pdproxy_kv_released_total).",
            unit="ops",
            queries=[
                Query(rate("pdproxy_kv_orphans_total"), "orphaned"),
                Query(rate("pdproxy_kv_released_total", by="result"), "{{result}}"),
            ],
            runbook="troubleshooting/alerts.md#pdproxykvorphaned",
        ),
        Panel(
            title="Pinned KV",
            description="Estimated tokens of orphaned KV cache at each prefiller (pdproxy_instance_pinned_kv_tokens).",
            unit="short",
            queries=[
                Query(
                    gauge(
                        "pdproxy_instance_pinned_kv_tokens", 'role="prefill"', by="address", of=INSTANCES, over="max"
                    ),
                    "{{address}}",
                )
            ],
            runbook="concepts/kv-cache.md#orphaned-kv-cache",
        ),
        Panel(
            title="Pairs kept apart",
            description="Quarantines of a prefiller and a decoder after failed handoffs "
            "(pdproxy_pair_quarantines_total), and failed loads of KV cache "
            "(pdproxy_retries_total), per second.",
            unit="ops",
            queries=[
                Query(rate("pdproxy_pair_quarantines_total"), "quarantines"),
                Query(rate("pdproxy_retries_total", matching('stage="prefill"', 'reason="missing_kv"')), "no KV"),
            ],
            runbook="troubleshooting/alerts.md#pdproxypairskeptapart",
        ),
        Panel(
            title="Failed transfers",
            description="Transfers of KV cache that failed, per second, as engines of a role count them "
            "(pdproxy_failed_transfers_total).",
            unit="ops",
            queries=[Query(rate("pdproxy_failed_transfers_total", by="role"), "{{role}}")],
            runbook="troubleshooting/alerts.md#pdproxypairskeptapart",
        ),
        Panel(
            title="Answers read back",
            description="Prefill legs per second that named a decoder's KV cache of the previous answer, by result "
            "(pdproxy_read_backs_total).",
            unit="ops",
            queries=[Query(rate("pdproxy_read_backs_total", by="result"), "{{result}}")],
            runbook="concepts/kv-cache.md#reading-answers-back",
        ),
        Panel(
            title="KV events",
            description="KV events of instances per second, by kind, and gaps in them, by reason "
            "(pdproxy_kv_events_total, pdproxy_kv_event_gaps_total). Requires `kv_events`.",
            unit="ops",
            queries=[
                Query(rate("pdproxy_kv_events_total", by="kind"), "{{kind}}"),
                Query(rate("pdproxy_kv_event_gaps_total", by="reason"), "gap: {{reason}}"),
            ],
            runbook="concepts/kv-cache.md#kv-events",
            needs="kv_events",
        ),
    ],
)

STAGES: Final = Dashboard(
    name="stages",
    title="pdproxy / Prefill and decode stages",
    description="Time of requests in each stage between prefillers and decoders, and results of the KV handoff.",
    variables=[JOB, GATEWAYS, ROLE, ADDRESS],
    rows=[_TIME, _TOKENS, _KV],
)
