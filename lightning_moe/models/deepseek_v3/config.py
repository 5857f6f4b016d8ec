"""The architecture of a DeepSeek-V3 model, in the field names of the Hugging Face ``config.json``."""

from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN extension of the rotary embedding (the ``rope_scaling`` entry of ``config.json``).

    It makes two separate corrections: the rotary frequencies, and the softmax scale of attention.

    Args:
        factor: How many times longer than ``original_max_position_embeddings`` the context becomes.
        original_max_position_embeddings: Context length that the model was trained with before the extension.
        beta_fast: Rotations over the original context above which a frequency is left as it is.
        beta_slow: Rotations over the original context below which a frequency is divided by ``factor``.
        mscale: Numerator of the multiplier of cos and sin; equal to ``mscale_all_dim`` in DeepSeek-V3, so that it is 1.
        mscale_all_dim: Enters the softmax scale as ``(0.1 * mscale_all_dim * ln(factor) + 1) ** 2``.
        type: Always ``"yarn"``.
    """

    factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        if self.type != "yarn":
            raise ValueError(f"rope_scaling.type is {self.type!r}, but it must be 'yarn'.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "type" and (not _is_number(value) or not isfinite(value)):
                raise ValueError(
                    f"rope_scaling.{field.name} is {value!r}, but it must be a finite number, as in {field.default}."
                )
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rope_scaling.{name} is {getattr(self, name)}, but it must be positive, as in 40.")
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor is {self.factor}, but an extension needs at least 1, as in 40.")
        if self.beta_fast < self.beta_slow:  # equal in Kimi-K2
            raise ValueError(
                f"rope_scaling.beta_fast is {self.beta_fast}, but it must be at least beta_slow "
                f"({self.beta_slow}); DeepSeek-V3 has 32 and 1."
            )


@dataclass(frozen=True)
class DeepSeekV3Config:
    """Architecture of a DeepSeek-V3 model; the defaults are those of the 671B model in its 4K pre-training stage.

    Field names are those of the Hugging Face ``config.json``. ``rope_scaling`` is off by default, because pre-training
    at 4K has no YaRN although the released ``config.json`` has it on (DeepSeek-V3 report, section 4.3).

    Args:
        vocab_size: Rows of the embedding and of the head. It is the truth: data is checked against it.
        hidden_size: Width ``D`` of the residual stream.
        intermediate_size: Width of the dense feed-forward layers.
        moe_intermediate_size: Width ``F`` of one expert.
        num_hidden_layers: Transformer blocks of the main model.
        num_nextn_predict_layers: Multi-token-prediction depth; 0 for none.
        num_attention_heads: Attention heads ``H``.
        n_shared_experts: Experts that every token takes; they are one feed-forward of that many expert widths.
        n_routed_experts: Routed experts ``E`` of a MoE layer.
        num_experts_per_tok: Routed experts ``K`` that a token takes.
        n_group: Groups of experts for group-limited routing; 1 for none.
        topk_group: Groups that a token may use.
        routed_scaling_factor: Factor on the routing weights.
        norm_topk_prob: Whether the chosen scores are divided by their sum.
        scoring_func: ``"sigmoid"`` (DeepSeek-V3) or ``"softmax"`` (DeepSeek-V2).
        topk_method: How groups are scored: ``"noaux_tc"`` by the sum of their two best experts (DeepSeek-V3),
            ``"group_limited_greedy"`` by their best one (DeepSeek-V2), ``"greedy"`` without groups (DeepSeek-V2-Lite).
        first_k_dense_replace: Blocks at the start that have a dense feed-forward instead of experts.
        q_lora_rank: Rank of the query compression; ``None`` for a direct projection.
        kv_lora_rank: Rank of the key-value compression.
        qk_nope_head_dim: Query and key dimensions of a head without position.
        qk_rope_head_dim: Query and key dimensions of a head that carry the position.
        v_head_dim: Value dimensions of a head.
        max_position_embeddings: Longest sequence that the model is meant for.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: YaRN extension of the context, or ``None``.
        rms_norm_eps: Epsilon of the norms of the residual stream. The norms inside attention always use 1e-6.
        initializer_range: Standard deviation of the initial weights (0.006 in the report).
        mtp_input: What the multi-token-prediction block takes from the main model: its hidden states after the
            final norm (as the released weights need) or before it.

    Raises:
        ValueError: A value breaks a rule; the message names the field, the value, the rule and a value that works.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    topk_method: Literal["noaux_tc", "group_limited_greedy", "greedy"] = "noaux_tc"
    first_k_dense_replace: int = 3
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.006
    mtp_input: Literal["post_norm", "pre_norm"] = "post_norm"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_routing()
        if self.qk_rope_head_dim % 2:
            self._fail("qk_rope_head_dim", "must be even, because rotary dimensions come in pairs", 64)
        if self.first_k_dense_replace > self.num_hidden_layers:
            self._fail(
                "first_k_dense_replace",
                f"must be at most num_hidden_layers ({self.num_hidden_layers})",
                self.num_hidden_layers,
            )
        if self.num_nextn_predict_layers >= self.max_position_embeddings:
            self._fail(
                "num_nextn_predict_layers",
                f"must be less than max_position_embeddings ({self.max_position_embeddings})",
                1,
            )
        if self.rope_scaling is not None:
            longest = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
            if self.max_position_embeddings > longest:
                self._fail(
                    "max_position_embeddings",
                    f"is beyond rope_scaling's factor x original_max_position_embeddings ({longest})",
                    longest,
                )

    def _fail(self, name: str, rule: str, works: Any) -> None:
        raise ValueError(f"{name} is {getattr(self, name)!r}, but it {rule}. A value that works: {name}={works}.")

    def _check_types(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    self._fail(field.name, "must be true or false", str(default).lower())
            elif isinstance(default, int) and not (field.name == "q_lora_rank" and value is None):
                if isinstance(value, bool) or not isinstance(value, int):
                    self._fail(field.name, "must be a whole number", default)
            elif isinstance(default, float) and not (_is_number(value) and isfinite(value)):
                self._fail(field.name, "must be a finite number", default)
        if not isinstance(self.rope_scaling, YarnScaling | None):
            self._fail("rope_scaling", "must be a YarnScaling or None", "YarnScaling(factor=40.0)")

    def _check_ranges(self) -> None:
        positive = (
            "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads "
            "n_routed_experts num_experts_per_tok n_group topk_group kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
            "v_head_dim max_position_embeddings rope_theta rms_norm_eps initializer_range routed_scaling_factor"
        )
        defaults = {field.name: field.default for field in fields(self)}
        for name in positive.split():
            if not getattr(self, name) > 0:
                self._fail(name, "must be positive", defaults[name])
        if self.n_routed_experts == 1:
            self._fail("n_routed_experts", "must be at least 2, so that there is a choice", 2)
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % 8:
                works = -(-getattr(self, name) // 8) * 8
                self._fail(name, "must be a multiple of 8, as the experts' grouped multiplication needs", works)
        for name in ("num_nextn_predict_layers", "n_shared_experts", "first_k_dense_replace"):
            if getattr(self, name) < 0:
                self._fail(name, "must not be negative", defaults[name])
        if self.q_lora_rank is not None and self.q_lora_rank <= 0:
            self._fail("q_lora_rank", "must be positive, or null for queries without compression", "null")
        for name, allowed in (
            ("scoring_func", ("sigmoid", "softmax")),
            ("topk_method", ("noaux_tc", "group_limited_greedy", "greedy")),
            ("mtp_input", ("post_norm", "pre_norm")),
        ):
            if getattr(self, name) not in allowed:
                self._fail(name, f"must be one of {', '.join(allowed)}", allowed[0])

    def _check_routing(self) -> None:
        if self.n_routed_experts % self.n_group:
            divisors = [g for g in range(1, self.n_routed_experts + 1) if self.n_routed_experts % g == 0]
            nearest = min(divisors, key=lambda g: abs(g - self.n_group))
            self._fail("n_group", f"must divide n_routed_experts ({self.n_routed_experts})", nearest)
        if self.topk_group > self.n_group:
            self._fail("topk_group", f"must be at most n_group ({self.n_group})", self.n_group)
        experts_per_group = self.n_routed_experts // self.n_group
        if self.n_group > 1 and self.topk_method == "noaux_tc" and experts_per_group < 2:
            self._fail(
                "n_group",
                f"leaves {experts_per_group} of {self.n_routed_experts} experts per group, but a group's score is "
                "the sum of its two best experts",
                max(self.n_routed_experts // 2, 1),
            )
        if self.n_group > 1 and self.topk_method == "greedy":
            self._fail("topk_method", f"chooses without groups, but n_group is {self.n_group}", "noaux_tc")
        selectable = self.topk_group * experts_per_group
        if self.num_experts_per_tok > selectable:
            self._fail(
                "num_experts_per_tok",
                f"must be at most the {selectable} experts of the selected groups "
                f"(topk_group {self.topk_group} x {experts_per_group} experts per group)",
                selectable,
            )

    @property
    def qk_head_dim(self) -> int:
        """Query and key dimensions of a head, without and with position together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "DeepSeekV3Config":
        """Returns a known architecture, with single fields replaced.

        Args:
            name: ``"deepseek_v3_671b"``, ``"moonlight_16b"`` (the DeepSeek-V3 architecture at 16B),
                ``"deepseek_v2_lite"`` (the 16B of TorchTitan's published result: softmax routing) or ``"tiny"``.
            **overrides: Fields to replace; ``rope_scaling`` may be a dictionary.

        Raises:
            ValueError: There is no such preset, or a field breaks a rule.
        """
        if name not in PRESETS:
            raise ValueError(f"config is {name!r}, but the presets are {', '.join(PRESETS)}. One that works: tiny.")
        return replace(PRESETS[name], **with_yarn(overrides))

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> "DeepSeekV3Config":
        """Reads an unmodified Hugging Face ``config.json``; see :mod:`.config_json`.

        Args:
            path: The file.
            **overrides: Fields to replace after reading; ``rope_scaling`` may be a dictionary, as in the file.

        Raises:
            ValueError: The file has a key that is not known, or describes a model that is not a DeepSeek-V3.
        """
        from lightning_moe.models.deepseek_v3.config_json import fields_from_json

        read = fields_from_json(path)
        return cls(**with_yarn({**read, **overrides}))


def with_yarn(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the same fields of :class:`DeepSeekV3Config`, with a dictionary ``rope_scaling`` as an object."""
    scaling = values.get("rope_scaling")
    if not isinstance(scaling, dict):
        return values
    scaling = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    unknown = set(scaling) - {field.name for field in fields(YarnScaling)}
    if unknown:
        raise ValueError(f"rope_scaling has unknown keys {', '.join(sorted(unknown))}; one that works: factor.")
    return {**values, "rope_scaling": YarnScaling(**scaling)}


PRESETS: dict[str, DeepSeekV3Config] = {
    "deepseek_v3_671b": DeepSeekV3Config(),
    "moonlight_16b": DeepSeekV3Config(
        vocab_size=163840,
        hidden_size=2048,
        intermediate_size=11264,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        q_lora_rank=None,
        max_position_embeddings=8192,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
    ),
    "deepseek_v2_lite": DeepSeekV3Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        scoring_func="softmax",
        topk_method="greedy",
        first_k_dense_replace=1,
        q_lora_rank=None,
    ),
    "tiny": DeepSeekV3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        initializer_range=0.02,
    ),
}
