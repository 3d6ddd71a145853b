"""Advice on the split of a fleet: its bottleneck, and the effect of moving one endpoint between roles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from lab.common.output import aligned
from lab.replay.figures import Figures, Slo, figures, mean
from lab.replay.fleet import Fleet, Replay
from lab.replay.policies import policies
from lab.replay.sweep import Progress, arrivals, fleets, in_virtual_time
from lab.replay.trace import Request
from proxy.balancer.split import LEAST_GAIN, RoleSplit
from proxy.tools.advise import recommendation_text


def advice(options: argparse.Namespace, traces: dict[str, list[Request]]) -> str:
    """Replay each trace, fleet and load with the fleet and its neighbours, under the same requests."""
    slo = Slo(options.slo_seconds, options.slo_base, options.slo_factor, options.slo_token_ms / 1000)
    lines = []
    for trace, requests in traces.items():
        for fleet in fleets(options):
            for load in options.loads:
                lines.append(f"{trace}, {fleet.name}, load {load:g}, {options.policies[0]}")
                lines.append(_advice(options, fleet, requests, load, slo))
    return "\n\n".join(lines)


def _advice(options: argparse.Namespace, fleet: Fleet, requests: Sequence[Request], load: float, slo: Slo) -> str:
    seen: list[tuple[Fleet, RoleSplit, Figures]] = []
    for other in (fleet, _moved(fleet, 1), _moved(fleet, -1)):
        if other is None:
            continue
        runs = []
        for seed in options.seeds:
            timed = arrivals(fleet, requests, load, seed)
            progress = Progress(f"{other.name}, load {load:g}, seed {seed}", len(timed))
            both = policies(other, options.decode_policy)[options.policies[0]]
            runs.append(in_virtual_time(other, both, timed, seed, options, progress))
        seen.append((other, split_of(runs[0], other), mean([figures(run, other, slo) for run in runs])))
    now, best = seen[0], max(seen, key=lambda each: each[2].good)
    rows: list[Sequence[str]] = [
        ("split", "prefillers busy", "decoders busy", "carries", "in time", "good", "mean", "p99", "token p99")
    ]
    rows += [_row(each, split, of, each is fleet) for each, split, of in seen]
    gain = best[2].good - now[2].good
    replayed = (
        f"Replayed, {best[0].name} has {100 * gain:.1f} points more good answers."
        if gain >= LEAST_GAIN
        else (f"Replayed, no other split has {100 * LEAST_GAIN:g} points more good answers than {now[0].name}.")
    )
    return f"{aligned(rows)}\n\nBy how busy they are: {recommendation_text(now[1])}\n{replayed}"


def _moved(fleet: Fleet, prefillers: int) -> Fleet | None:
    if fleet.prefillers + prefillers < 1 or fleet.decoders - prefillers < 1:
        return None
    return replace(fleet, prefillers=fleet.prefillers + prefillers, decoders=fleet.decoders - prefillers)


def _row(fleet: Fleet, split: RoleSplit, of: Figures, is_now: bool) -> Sequence[str]:
    return (
        f"{fleet.name} (now)" if is_now else fleet.name,
        *(f"{split.prefill_busy:.0%}", f"{split.decode_busy:.0%}", f"{split.load_capacity:.2f}×"),
        *(f"{100 * of.in_time:.1f} %", f"{100 * of.good:.1f} %"),
        *(f"{of.mean:.2f} s", f"{of.p99:.2f} s", f"{1000 * of.token_p99:.0f} ms"),
    )


def split_of(run: Replay, fleet: Fleet) -> RoleSplit:
    """Return how busy both roles were in a run.

    Prefillers count by busy time, and decoders by their tokens relative to the saturation point. Work after the last
    arrival counts, too.
    """
    requests = [course.request for course in run.courses]
    seconds = requests[-1].at
    busy = sum(engine.batch.busy_seconds for backend, engine in run.engines.items() if backend.role.value == "prefill")
    decode = fleet.decode_machine
    kv_tokens = sum(request.input_tokens for request in requests) // len(requests)
    rate = fleet.speed * decode.cost.knee_rate(decode.decode.max_num_seqs, kv_tokens)
    tokens = sum(request.output_tokens for request in requests)
    return RoleSplit(
        fleet.prefillers, fleet.decoders, busy / seconds / fleet.capacity, tokens / seconds / (rate * fleet.decoders)
    )
