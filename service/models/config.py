"""What a model is and how it is trained, as frozen data: architectures, presets and run settings; no JAX here.

Three groups, which together are everything a train step depends on (`StepConfig`):
`ModelConfig` (the architecture, made by a preset and overrides), `TrainConfig`, `ContextConfig` and `MoeConfig` (how it is
run), and `MeshAxes` (over what it is sharded). Dtypes are strings until JAX is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

DType = Literal["bfloat16", "float32"]
ProgramName = Literal["candidate", "dropless"]
# Bounds lie far above anything real. What passes them keeps every index within int32 and every byte count within int64, together with
# `spec_sizes`, which looks at the products.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Count = Annotated[int, Field(ge=1, le=2**16)]
AxisSize = Annotated[int, Field(ge=1, le=2**21)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Scale = Annotated[float, Field(gt=0, le=1e6)]

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}


class Frozen(BaseModel):
    """Base of every configuration: immutable, hashable, and strict about unknown fields and about types: no value is read as another.

    A whole number may stand for a float, and a list for a tuple.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def illegal(message: str, legal: str) -> PydanticCustomError:
    """An error for a field's validator to raise; `legal` says what would be accepted."""
    return PydanticCustomError("illegal", "{message}", {"message": message, "legal": legal})


class YarnConfig(Frozen):
    """YaRN rope scaling, applied where the sequence exceeds `original_seq_len` (DeepSeek-V3, arXiv 2412.19437, section 4.3)."""

    factor: Annotated[float, Field(ge=1, le=1e6)] = 40.0
    original_seq_len: Positive = 4096
    beta_fast: Scale = 32.0
    beta_slow: Scale = 1.0
    mscale: Weight = 1.0


class MlaConfig(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: Width | None = Field(description="rank of the query's projection; null projects at full rank")
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without position and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class ExpertsConfig(Frozen):
    """Mixture of experts: the router's rule and the sizes (DeepSeek-V3, section 2.1.2)."""

    num_experts: Annotated[int, Field(ge=1, le=8192)]
    num_experts_per_token: Count
    expert_dim: Width = Field(description="hidden width of one expert")
    num_shared_experts: Annotated[int, Field(ge=0, le=1024)] = 1
    num_groups: Count = 1
    num_groups_per_token: Count = 1
    score_func: Literal["sigmoid", "softmax"] = "sigmoid"
    bias: bool = Field(default=True, description="per-expert bias that takes part in the choice, not in the weights")
    bias_update_rate: Weight = 0.001
    normalize: bool = True
    scaling: Scale = 2.5
    balance_loss_weight: Weight = 0.0001


class EngramConfig(Frozen):
    """Conditional memory read by n-gram hash (Engram, arXiv 2601.07372)."""

    layers: tuple[NonNegative, ...] = Field(strict=False, min_length=1, max_length=64)
    max_ngram: Annotated[int, Field(ge=2, le=8)]
    num_heads: Positive = Field(description="hash heads per n-gram order")
    head_dim: Width = Field(description="width of one table row")
    base_sizes: tuple[Positive, ...] = Field(strict=False, description="smallest prime modulus per n-gram order, orders 2 to max_ngram")
    kernel_size: Annotated[int, Field(ge=1, le=64)] = 4
    pad_id: NonNegative = 2
    seed: NonNegative = 0
    respect_documents: bool = False

    @property
    def num_orders(self) -> int:
        """How many n-gram orders are hashed: 2, 3, …, max_ngram."""
        return self.max_ngram - 1

    @property
    def embedding_dim(self) -> int:
        """Width of what one token reads: every head of every order, side by side."""
        return self.head_dim * self.num_heads * self.num_orders

    @property
    def halo(self) -> int:
        """Tokens of history the dilated convolution reads: (kernel_size - 1) * max_ngram."""
        return (self.kernel_size - 1) * self.max_ngram

    @field_validator("layers")
    @classmethod
    def _each_layer_once(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(layers)) != len(layers):
            raise illegal(f"{list(layers)} names a layer twice", "a list that names each layer once")
        return layers

    @field_validator("base_sizes")
    @classmethod
    def _one_base_per_order(cls, base_sizes: tuple[int, ...], info: Any) -> tuple[int, ...]:  # Any: no protocol at runtime
        max_ngram = info.data.get("max_ngram", len(base_sizes) + 1)
        if len(base_sizes) != max_ngram - 1:
            raise illegal(
                f"has {len(base_sizes)} of the {max_ngram - 1} entries that max_ngram {max_ngram} needs, one per order from 2",
                f"a list of {max_ngram - 1}" + (f", or max_ngram {len(base_sizes) + 1}" if 1 <= len(base_sizes) <= 7 else ""),
            )
        return base_sizes


class MtpConfig(Frozen):
    """Multi-token prediction (DeepSeek-V3, section 2.2)."""

    depth: Annotated[int, Field(ge=0, le=16)] = 0
    loss_weight: Weight = 0.1


class MhcConfig(Frozen):
    """Manifold-constrained hyper-connections (arXiv 2512.24880)."""

    num_streams: Annotated[int, Field(ge=1, le=16)] = 1
    sinkhorn_iterations: Annotated[int, Field(ge=1, le=100)] = 20


class ModelConfig(Frozen):
    """One DeepSeek-style decoder."""

    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    first_num_dense_layers: Annotated[int, Field(ge=0, le=4096)] = Field(
        description="leading layers with a dense feed-forward; the rest are MoE"
    )
    dim: Width = Field(description="model width D")
    num_heads: Count
    mla: MlaConfig
    mlp_dim: Width | None = Field(description="hidden width of the dense feed-forward; null where no layer is dense")
    experts: ExpertsConfig | None
    engram: EngramConfig | None = None
    mhc: MhcConfig = MhcConfig()
    mtp: MtpConfig = MtpConfig()
    rope_theta: Annotated[float, Field(gt=1, le=1e12)] = 10000.0
    yarn: YarnConfig | None = None
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts, MTP modules apart."""
        return self.num_layers - self.first_num_dense_layers


class RematConfig(Frozen):
    """Which intermediates a layer keeps for its backward pass, beside what the policy says."""

    policy: Literal["full", "minimal", "none"] = "full"
    save: tuple[str, ...] = Field(default=(), strict=False, max_length=16, description="named tensors kept on the device")
    offload: tuple[str, ...] = Field(default=(), strict=False, max_length=16, description="named tensors kept in host memory")


REMAT_NAMES = ("attention_out", "mla_q", "mla_kv", "mlp_hidden", "moe_out", "engram_out")
"""Tensors a remat policy can name; each is marked in the model with `checkpoint_name`."""


class TrainConfig(Frozen):
    """How the model is trained."""

    seq_len: Positive
    per_device_batch: Annotated[float, Field(gt=0, le=2**20)] = Field(
        default=1.0, description="sequences per device; may be fractional when the global batch is whole"
    )
    dtype: DType = "bfloat16"
    param_dtype: DType = "float32"
    moment_dtype: DType | None = Field(default=None, description="of both AdamW moments; null is the parameters' dtype")
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: Scale = 3e-4
    weight_decay: Weight = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    attention: Literal["dot_product", "flash"] = "dot_product"
    remat: RematConfig = RematConfig()
    vocab_chunks: Positive = Field(default=1, description="pieces the sequence's logits are computed in, so that they never stand whole")
    packing: bool = True

    @model_validator(mode="before")
    @classmethod
    def _remat_by_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("remat"), str):
            return {**data, "remat": {"policy": data["remat"]}}
        return data


class ContextConfig(Frozen):
    """In which order the sequence lies over the `context` axis."""

    load_balance: bool = True
    order: Literal["auto", "dual_chunk_swap", "striped"] = "auto"


class DroplessConfig(Frozen):
    """How the dropless program fits its worst-case buffers."""

    token_chunks: Positive = 1


class MoeConfig(Frozen):
    """How mixture-of-experts layers are run."""

    ragged_buffer_factor: float = Field(
        default=-1.0,
        description="receive rows as a share of the local assignments, above 0 and at most 1,024; -1 is the worst case, which never drops",
    )
    retry_when_tokens_dropped: bool = False
    dropless: DroplessConfig = DroplessConfig()

    @field_validator("ragged_buffer_factor")
    @classmethod
    def _worst_case_or_positive(cls, factor: float) -> float:
        if factor != -1 and not 0 < factor <= 1024:
            raise illegal(f"{factor:g} is out of range", "-1 for the worst case, or a factor above 0 and at most 1,024")
        return factor


class MeshAxes(Frozen):
    """How many devices each mesh axis has; their product is the number of devices."""

    data: AxisSize = 1
    fsdp: AxisSize = 1
    expert: AxisSize = 1
    context: AxisSize = 1
    tensor: AxisSize = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.expert * self.context * self.tensor

    @property
    def batch_shards(self) -> int:
        """Pieces the batch is cut in: it lies over data, fsdp and expert."""
        return self.data * self.fsdp * self.expert

    def as_dict(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {name: getattr(self, name) for name in AXIS_NAMES}


AXIS_NAMES = ("data", "fsdp", "expert", "context", "tensor")


class StepConfig(Frozen):
    """Everything one train step depends on."""

    model: ModelConfig
    train: TrainConfig
    axes: MeshAxes
    context: ContextConfig = ContextConfig()
    moe: MoeConfig = MoeConfig()

    @property
    def global_batch(self) -> int:
        """Sequences in one step over all devices: per_device_batch * devices."""
        return round(self.train.per_device_batch * self.axes.num_devices)

    @property
    def load_balanced(self) -> bool:
        """Whether training input is in load-balanced order: more than one context rank, and balance asked for."""
        return self.context.load_balance and self.axes.context > 1

    @property
    def retries(self) -> bool:
        """Whether a step that dropped tokens is replayed, so that it must leave its state alive; without experts nothing is dropped."""
        return self.moe.retry_when_tokens_dropped and self.model.experts is not None


def deepseek_v3_671b() -> ModelConfig:
    """DeepSeek-V3: 671.03 B parameters in the main model (arXiv 2412.19437, section 4.2); MTP depth 0 unless asked for."""
    return ModelConfig(
        vocab_size=129280,
        num_layers=61,
        first_num_dense_layers=3,
        dim=7168,
        num_heads=128,
        mla=MlaConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        mlp_dim=18432,
        experts=ExpertsConfig(
            num_experts=256, num_experts_per_token=8, expert_dim=2048, num_shared_experts=1, num_groups=8, num_groups_per_token=4
        ),
        yarn=YarnConfig(),
    )


def deepseek_v2_16b() -> ModelConfig:
    """DeepSeek-V2-Lite: 15.71 B parameters (arXiv 2405.04434, appendix B)."""
    return ModelConfig(
        vocab_size=102400,
        num_layers=27,
        first_num_dense_layers=1,
        dim=2048,
        num_heads=16,
        mla=MlaConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        mlp_dim=10944,
        experts=ExpertsConfig(
            num_experts=64,
            num_experts_per_token=6,
            expert_dim=1408,
            num_shared_experts=2,
            score_func="softmax",
            bias=False,
            normalize=False,
            scaling=1.0,
            balance_loss_weight=0.001,
        ),
        yarn=YarnConfig(mscale=0.707),
    )


def deepseek_custom() -> ModelConfig:
    """A six-layer decoder with Engram on two layers and four mHC streams: the public end-to-end case of the field."""
    return ModelConfig(
        vocab_size=129280,
        num_layers=6,
        first_num_dense_layers=1,
        dim=1024,
        num_heads=16,
        mla=MlaConfig(q_lora_rank=384, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=128),
        mlp_dim=2048,
        experts=ExpertsConfig(num_experts=16, num_experts_per_token=2, expert_dim=512),
        engram=EngramConfig(layers=(1, 4), max_ngram=3, num_heads=8, head_dim=512, base_sizes=(226240, 226240)),
        mhc=MhcConfig(num_streams=4),
    )


def v4_1_scale() -> ModelConfig:
    """The sizes of the released DeepSeek-V4.1-Flash with its sparse attention replaced by MLA: a stress case, not the release."""
    return ModelConfig(
        vocab_size=129280,
        num_layers=40,
        first_num_dense_layers=0,
        dim=5120,
        num_heads=64,
        mla=MlaConfig(q_lora_rank=1280, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        mlp_dim=None,
        experts=ExpertsConfig(num_experts=384, num_experts_per_token=6, expert_dim=2304),
        engram=EngramConfig(layers=(1, 14), max_ngram=4, num_heads=8, head_dim=256, base_sizes=(16_000_000,) * 3),
        mhc=MhcConfig(num_streams=4),
    )


def tiny() -> ModelConfig:
    """Seconds on a CPU, with every part switched on and sizes pairwise different."""
    return ModelConfig(
        vocab_size=512,
        num_layers=4,
        first_num_dense_layers=1,
        dim=64,
        num_heads=4,
        mla=MlaConfig(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20),
        mlp_dim=96,
        experts=ExpertsConfig(
            num_experts=8, num_experts_per_token=2, expert_dim=40, num_groups=4, num_groups_per_token=2, balance_loss_weight=0.001
        ),
        engram=EngramConfig(layers=(1, 2), max_ngram=3, num_heads=2, head_dim=32, base_sizes=(251, 307), kernel_size=4),
        mhc=MhcConfig(num_streams=2),
        mtp=MtpConfig(depth=1),
    )


PRESETS: Mapping[str, Callable[[], ModelConfig]] = {
    "deepseek-v3-671b": deepseek_v3_671b,
    "deepseek-v2-16b": deepseek_v2_16b,
    "deepseek-custom": deepseek_custom,
    "v4.1-scale": v4_1_scale,
    "tiny": tiny,
}
