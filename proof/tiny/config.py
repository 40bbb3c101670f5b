"""Sizes of the built-in target and draft, and the config.json files that say them to SGLang and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_w4a8_lab.draft.eagle3 import DraftSizes
from kimi_w4a8_lab.draft.layers import LatentSizes

from .tokenizer import BOS_ID, EOS_ID, IM_END_ID, MEDIA_PAD_ID, PAD_ID


@dataclass(frozen=True)
class TargetConfig:
    """DeepSeek-V3 architecture at two million weights. Every size divides by 4, so TP 1, 2 and 4 all fit."""

    vocab: int = 640
    hidden: int = 128
    layers: int = 5
    dense_layers: int = 1
    dense_inter: int = 256
    heads: int = 4
    q_lora: int = 64
    kv_lora: int = 64
    nope: int = 32
    rope: int = 32
    v: int = 32
    experts: int = 16
    top_k: int = 4
    moe_inter: int = 64
    routed_scale: float = 2.0
    eps: float = 1e-5
    rope_theta: float = 50_000.0
    rope_factor: float = 4.0
    original_context: int = 16_384  # the frequencies are those of the training, with 2,048, 32 and 1

    @property
    def context(self) -> int:
        """Longest sequence in tokens: yarn stretches the original context by its factor."""
        return int(self.original_context * self.rope_factor)

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The yarn entry of config.json."""
        return {
            "type": "yarn", "rope_type": "yarn", "factor": self.rope_factor,
            "original_max_position_embeddings": self.original_context, "beta_fast": 256.0, "beta_slow": 8.0,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        }  # fmt: skip

    @property
    def latent(self) -> LatentSizes:
        """Sizes of its attention."""
        return LatentSizes(
            self.hidden, self.heads, self.q_lora, self.kv_lora, self.nope, self.rope, self.v, self.eps, self.rope_theta,
            self.rope_scaling,
        )  # fmt: skip


@dataclass(frozen=True)
class TowerConfig:
    """MoonViT and projector. grid: patches of a picture, rows and columns, of which `merge` by `merge` are a token."""

    patch: int = 14
    grid: tuple[int, int] = (2, 8)
    merge: int = 2
    hidden: int = 24
    heads: int = 2
    layers: int = 2
    inter: int = 64
    text_hidden: int = 128

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class DraftConfig:
    """One Llama layer that reads three hidden states of the target.

    `captured` lists target layers in SGLang's way of counting: the state that *enters* layer i. It must not begin
    with 1, because SGLang then shifts the whole list by one.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inter: int = 256
    captured: tuple[int, ...] = (2, 3, 4)
    rope_theta: float = 10_000.0


@dataclass(frozen=True)
class MlaDraftConfig:
    """One layer with the target's own attention."""

    inter: int = 256
    captured: tuple[int, ...] = (2, 3, 4)


def draft_sizes(target: TargetConfig, draft: DraftConfig | MlaDraftConfig) -> DraftSizes:
    """Sizes of a draft of this target, as its config.json says them."""
    heads, kv_heads, head_dim, theta = 0, 0, 0, 0.0
    if isinstance(draft, DraftConfig):
        heads, kv_heads, head_dim, theta = draft.heads, draft.kv_heads, draft.head_dim, draft.rope_theta
    return DraftSizes(
        hidden=target.hidden, target_hidden=target.hidden, inter=draft.inter, rows=target.vocab,
        captured=draft.captured, eps=target.eps, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_theta=theta,
        latent=None if heads else target.latent,
    )  # fmt: skip


def text_config_json(config: TargetConfig) -> dict[str, Any]:
    """`text_config` of config.json; on its own also a valid config for transformers' DeepseekV3ForCausalLM."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": config.vocab,
        "hidden_size": config.hidden, "num_hidden_layers": config.layers, "first_k_dense_replace": config.dense_layers,
        "moe_layer_freq": 1, "intermediate_size": config.dense_inter, "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads, "q_lora_rank": config.q_lora, "kv_lora_rank": config.kv_lora,
        "qk_nope_head_dim": config.nope, "qk_rope_head_dim": config.rope, "v_head_dim": config.v,
        "attention_bias": False, "attention_dropout": 0.0, "n_routed_experts": config.experts,
        "num_experts_per_tok": config.top_k, "n_shared_experts": 1, "moe_intermediate_size": config.moe_inter,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scale, "ep_size": 1, "num_nextn_predict_layers": 0, "hidden_act": "silu",
        "rms_norm_eps": config.eps, "initializer_range": 0.02, "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling, "tie_word_embeddings": False,
        "use_cache": True, "dtype": "bfloat16", "pad_token_id": PAD_ID, "bos_token_id": BOS_ID,
        "eos_token_id": IM_END_ID,
    }  # fmt: skip


def target_config_json(config: TargetConfig, tower: TowerConfig) -> dict[str, Any]:
    """config.json of the Kimi-K2.5 wrapper.

    `language_model_only` keeps SGLang from asking for an image processor; it loads the tower all the same.
    """
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "language_model_only": True,
        "dtype": "bfloat16", "tie_word_embeddings": False, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID,
        "eos_token_id": IM_END_ID, "media_placeholder_token_id": MEDIA_PAD_ID, "text_config": text_config_json(config),
        "vision_config": {
            "model_type": "kimi_k25_vision", "patch_size": tower.patch, "init_pos_emb_height": tower.grid[0],
            "init_pos_emb_width": tower.grid[1], "init_pos_emb_time": 4, "num_attention_heads": tower.heads,
            "num_hidden_layers": tower.layers, "hidden_size": tower.hidden, "intermediate_size": tower.inter,
            "mm_hidden_size": tower.hidden, "merge_kernel_size": [tower.merge, tower.merge],
            "vt_num_attention_heads": tower.heads, "vt_num_hidden_layers": tower.layers, "vt_hidden_size": tower.hidden,
            "vt_intermediate_size": tower.inter, "text_hidden_size": config.hidden,
        },
    }  # fmt: skip


def preprocessor_config_json(tower: TowerConfig) -> dict[str, Any]:
    """preprocessor_config.json: how a picture is cut, and the class in the package that does it."""
    return {
        "processor_class": "TinyKimiProcessor",
        "media_proc_cfg": {
            "patch_size": tower.patch, "merge_kernel_size": tower.merge,
            "in_patch_limit": tower.grid[0] * tower.grid[1], "patch_limit_on_one_side": tower.grid[1],
            "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        },
    }  # fmt: skip


def generation_config_json() -> dict[str, Any]:
    """generation_config.json: a turn ends at <|im_end|>."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": [IM_END_ID, EOS_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
        "max_length": TargetConfig().context,
    }


def draft_config_json(target: TargetConfig, draft: DraftConfig | MlaDraftConfig) -> dict[str, Any]:
    """config.json of an EAGLE3 draft. Its lm_head is its own, its embedding the target's."""
    own = _mla_draft_json(target) if isinstance(draft, MlaDraftConfig) else _mha_draft_json(target, draft)
    return {
        **own, "dtype": "bfloat16", "vocab_size": target.vocab, "draft_vocab_size": target.vocab,
        "hidden_size": target.hidden, "target_hidden_size": target.hidden, "num_hidden_layers": 1,
        "intermediate_size": draft.inter, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": target.eps,
        "initializer_range": 0.02, "max_position_embeddings": target.context, "tie_word_embeddings": False,
        "use_cache": True, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": IM_END_ID,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(draft.captured), "use_aux_hidden_state": True},
    }  # fmt: skip


def _mha_draft_json(target: TargetConfig, draft: DraftConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_attention_heads": draft.heads,
        "num_key_value_heads": draft.kv_heads, "head_dim": draft.head_dim, "mlp_bias": False,
        "rope_theta": draft.rope_theta, "rope_scaling": None,
    }  # fmt: skip


def _mla_draft_json(target: TargetConfig) -> dict[str, Any]:
    names = (
        "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "rope_theta", "rope_scaling",
    )  # fmt: skip
    text = text_config_json(target)
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: text[name] for name in names},
    }
