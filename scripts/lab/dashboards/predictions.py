"""Why instances are chosen, and whether what is thought of them comes true."""

from __future__ import annotations

from typing import Final

from lab.dashboards.grafana import Panel, Query, Row
from lab.dashboards.promql import INSTANCES, gauge, percentiles, rate


def _reasons(role: str) -> Panel:
    return Panel(
        title=f"Why: {role}",
        description=f"Choices of an instance of role {role}, per second, by reason (pdproxy_choices_total), such as "
        "the prompt in its cache, being soonest done, being one of several equal ones, or the only candidate.",
        unit="ops",
        width=12,
        stacked=True,
        queries=[Query(rate("pdproxy_choices_total", f'role="{role}"', by="reason"), "{{reason}}")],
        runbook="how-it-chooses",
    )


_KNEES: Final = gauge("pdproxy_instance_knee", by="address", of=INSTANCES, over="max")

PREDICTIONS: Final = Row(
    "What is predicted, and why",
    [
        _reasons("prefill"),
        _reasons("decode"),
        Panel(
            title="Prefills: taken over predicted",
            description="What prefills took over what was predicted when their prefillers were chosen "
            "(pdproxy_prefill_prediction_ratio). 1 is right; steadily elsewhere, prefillers do something else besides, "
            "or their speed changes.",
            unit="none",
            decimals=2,
            width=6,
            queries=percentiles("pdproxy_prefill_prediction_ratio"),
            runbook="how-it-chooses",
        ),
        Panel(
            title="Cached tokens: predicted and found",
            description="Prompt tokens per second that prefillers were thought to have cached, and those that they "
            "had, as far as they tell (pdproxy_prefill_hit_tokens_total). Far fewer found than predicted: caches are "
            "smaller than thought, or switched off.",
            unit="short",
            width=6,
            queries=[Query(rate("pdproxy_prefill_hit_tokens_total", by="kind"), "{{kind}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            title="What requests wait for",
            description="Requests that had to wait, per second, by what for (pdproxy_queue_waits_total): room at an "
            "instance of a role, a better prefiller than those with room, or others before them.",
            unit="ops",
            width=6,
            stacked=True,
            queries=[Query(rate("pdproxy_queue_waits_total", by="reason"), "{{reason}}")],
            runbook="how-it-chooses",
        ),
        Panel(
            title="Knees of decoders",
            description="Answers at a time beyond which a decoder was seen to make fewer tokens a second, so that it "
            "gets no more (pdproxy_instance_knee).",
            unit="none",
            width=6,
            queries=[Query(f'{_KNEES} or label_replace(vector(0), "address", "none seen", "", "")', "{{address}}")],
            runbook="how-it-chooses",
        ),
    ],
)
