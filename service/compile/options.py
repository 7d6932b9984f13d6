"""The compiler options a spec may set: an allow-list by name and type, so that none can write a file or load code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALLOWED: Mapping[str, type] = {
    "xla_tpu_max_hbm_size_mib": int,
    "xla_tpu_scoped_vmem_limit_kib": int,
    "xla_tpu_enable_latency_hiding_scheduler": bool,
    "xla_latency_hiding_scheduler_rerun": int,
    "xla_tpu_enable_async_collective_fusion": bool,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": bool,
    "xla_tpu_enable_data_parallel_all_reduce_opt": bool,
    "xla_tpu_data_parallel_opt_different_sized_ops": bool,
    "xla_tpu_overlap_compute_collective_tc": bool,
    "xla_enable_async_all_gather": bool,
    "xla_enable_async_collective_permute": bool,
    "xla_tpu_rwb_fusion": bool,
    "xla_tpu_enable_all_experimental_scheduler_features": bool,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": bool,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": bool,
    "xla_tpu_prefer_async_allgather_to_allreduce": bool,
    "xla_tpu_host_transfer_overlap_limit": int,
    "xla_max_concurrent_async_all_gathers": int,
}
"""Option name to the type of its value. Each is compiled with for real by tests/compile/test_options.py."""


def legal_value(name: str, value: Any) -> bool:
    """Whether `value` has the type the compiler takes for an allowed option; a bool is not a number here."""
    if ALLOWED[name] is bool:
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
