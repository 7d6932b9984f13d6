"""The smallest model with every part on, sizes pairwise different, for whole steps on a few CPU devices."""

from __future__ import annotations

from service.models.config import EngramConfig, ExpertsConfig, MhcConfig, MlaConfig, ModelConfig, MtpConfig

V, K = 80, 2
"""Vocabulary, and experts per token."""

EVERYTHING = ModelConfig(
    vocab_size=V,
    num_layers=2,
    first_num_dense_layers=1,
    dim=24,
    num_heads=4,
    mla=MlaConfig(q_lora_rank=16, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6),
    mlp_dim=28,
    experts=ExpertsConfig(
        num_experts=6, num_experts_per_token=K, expert_dim=12, num_groups=3, num_groups_per_token=2, bias_update_rate=0.125
    ),
    engram=EngramConfig(layers=(1,), max_ngram=2, num_heads=2, head_dim=10, base_sizes=(37,), kernel_size=3),
    mhc=MhcConfig(num_streams=3, sinkhorn_iterations=2),
    mtp=MtpConfig(depth=2),
)
