"""A host tier for vLLM's OffloadingConnector on a machine whose device is the host.

vLLM 0.32 copies between device and host with CUDA's streams only (`CPUOffloadingSpec.get_worker`). The scheduler's
part is used as it is: it decides what is stored, loaded and evicted, counts hits and publishes events. Here the copies
are those of tensors.

Loaded by the engine, not by the tests: `"spec_name": "HostOffloadingSpec"` with `"spec_module_path"` of this module.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies at once, and reports each copy as finished at the next question."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._device = [each.tensor for each in kv_caches.tensors]
        self._host = [torch.empty((chunks, *each.shape[1:]), dtype=each.dtype) for each in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        source: BlockIDsLoadStoreSpec,
        targets: list[torch.Tensor],
        target: BlockIDsLoadStoreSpec,
    ) -> bool:
        began, size = time.monotonic(), 0
        places = torch.from_numpy(source.block_ids).long(), torch.from_numpy(target.block_ids).long()
        for from_tensor, to_tensor in zip(sources, targets, strict=True):
            copied = from_tensor[places[0]]
            to_tensor[places[1]] = copied
            size += copied.nbytes
        self._finished.append(TransferResult(job_id, True, size, time.monotonic() - began))
        return True
