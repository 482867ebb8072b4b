"""vLLM's Ray executor on CPUs: tensor-parallel ranks as Ray actors, over machines or on one.

    vllm serve MODEL --tensor-parallel-size 2 \\
        --distributed-executor-backend kvcompress_serving.ray_executor.CPURayExecutor

``--distributed-executor-backend ray`` ends with "current platform cpu does not support ray" in
vLLM 0.32 (``vllm/v1/executor/ray_utils.py``, ``initialize_ray_cluster``), because its CPU platform
names no Ray resource for a rank. This executor is vLLM's, with a rank for each of Ray's CPUs; it
needs nothing of compression and works without it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class CPURayWorker(RayWorkerProc):
    """A rank; it has no device to report."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class CPURayExecutor(RayExecutorV2):
    """Runs each rank in an actor that takes one CPU of Ray.

    vLLM's own class of that name is used for all else: placement, messages, environment, failures.
    """

    def _init_executor(self) -> None:
        if not current_platform.is_cpu():
            raise ValueError(
                f"CPURayExecutor is for the CPU build of vLLM, and this is "
                f"'{current_platform.device_type}'; use --distributed-executor-backend ray"
            )
        with (
            mock.patch.object(current_platform, "ray_device_key", "CPU"),
            mock.patch.object(ray_executor_v2, "RayWorkerProc", CPURayWorker),
        ):
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        # the placement group holds the CPU; `num_cpus` is vLLM's to give
        return {"num_gpus": 0}
