"""Requests shown in the OpenAPI description; tests/api/test_openapi.py posts each of them."""

from __future__ import annotations

from typing import Any

JOB_REQUEST: dict[str, Any] = {
    "from_a_shell": {
        "summary": "The smallest request",
        "value": {
            "spec": {
                "scenario": "tiny-v5e-4",
                "model": {"preset": "tiny"},
                "train": {"seq_len": 128},
                "mesh": {"topology": "v5e-4", "fsdp": 4},
            }
        },
    },
    "from_ci": {
        "summary": "DeepSeek-V3 on 256 v5p chips, from a pull request",
        "value": {
            "spec": {
                "scenario": "deepseek-v3-671b-v5p-512",
                "model": {"preset": "deepseek-v3-671b"},
                "train": {"seq_len": 4096, "per_device_batch": 1, "param_dtype": "bfloat16"},
                "mesh": {"topology": "v5p-512", "fsdp": 16, "expert": 16},
            },
            "git": {
                "project": "trainer",
                "commit_sha": "1f0c7a52b9c34ad0f6a1d20f6ad1b7f6f3c2b9e4",
                "branch": "wider-experts",
                "base_sha": "9e8d7c6b5a4f3e2d1c0b9a8f7e6d5c4b3a2f1e0d",
                "pull_request": 5992,
            },
            "force": False,
            "depth": "memory",
        },
    },
}

JOB_REQUEST_YAML: dict[str, Any] = {
    "spec_file": {
        "summary": "A spec file as it is",
        "value": ("scenario: tiny-v5e-4\nmodel: {preset: tiny}\ntrain: {seq_len: 128}\nmesh: {topology: v5e-4, fsdp: 4}\n"),
    }
}
