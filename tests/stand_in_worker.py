"""The CPU worker with our GPU backend, for the process of `gpu_stand_in`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_kvcompress.engine import settings, worker
from vllm_kvcompress.engine.worker import CompressionCPUWorker

_STOCK = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
_OURS = "vllm_kvcompress.engine.backend_triton.CompressionTritonBackend"

# vLLM asks it for a tiling when it writes the cache
torch.cuda.get_device_capability = lambda device=None: (9, 0)


class GpuBackendWorker(CompressionCPUWorker):
    """Loads a model as `CompressionGPUWorker` does: its layers find our backend over Triton's.

    vLLM's CPU platform knows one backend, ``CPU_ATTN``; here that name stands for it.
    """

    def load_model(self, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "register_backend", lambda name, _: register_backend(name, _OURS))
            super().load_model(**kwargs)


@contextmanager
def triton_backend() -> Iterator[None]:
    """Engines that are made meanwhile attend as on a GPU: by vLLM's Triton backend, or by ours over
    it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "CPU_WORKER", f"{__name__}.GpuBackendWorker")
        patch.setattr(settings, "CPU_BLOCK_SIZE", settings.GPU_BLOCK_SIZE)
        register_backend(AttentionBackendEnum.CPU_ATTN, _STOCK)
        try:
            yield
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
