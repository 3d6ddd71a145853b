"""A scheduler for real engines that ends requests as vLLM-Ascend's does when a decoder runs out of KV cache.

It obeys orders, and acts like vllm_ascend/core/recompute_scheduler.py: the newest running request is aborted, its
blocks are freed, and its last output has no tokens and the stop reason `recomputed`. A token that was being computed
for it is lost, as with asynchronous scheduling there, so a request may end before its first token, too.

Loaded by the engine, not by the tests: `--scheduler-cls tests.real.recompute_scheduler.RecomputeScheduler`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from tests.real.orders import Orders

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

ORDERS = "PDPROXY_RECOMPUTE_ORDERS"


class RecomputeScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._orders = Orders(Path(os.environ[ORDERS]))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        victim = self.running[-1] if self.running else None
        if victim is None or not self._orders.take(victim.num_output_tokens):
            return super().update_from_output(scheduler_output, model_runner_output)
        self.finish_requests(victim.request_id, RequestStatus.FINISHED_ABORTED)
        # The result of this step for the finished request is dropped.
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        notice = EngineCoreOutput(
            request_id=victim.request_id, new_token_ids=[], finish_reason=FinishReason.STOP, stop_reason="recomputed"
        )
        outputs.setdefault(victim.client_index, EngineCoreOutputs()).outputs.insert(0, notice)
        return outputs
