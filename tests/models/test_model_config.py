"""Published configurations load; whatever would change the mathematics unseen is refused by name."""

from typing import Any

import pytest

from models.config import ModelConfig, parse_config

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
}


def shape(width: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def family(model_type: str, **keys: Any) -> dict[str, Any]:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}[model_type]
    return COMMON | {"model_type": model_type, "architectures": [name + "ForCausalLM"]} | keys


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
PHI = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}


def long_factors(n: int) -> dict[str, Any]:
    return {"type": "longrope", "long_factor": [1.0 + i for i in range(n)], "short_factor": [1.0] * n}


# The key sets of the published config.json files; head_dim, layers, the last layer's window, biases of q.
PUBLISHED = {
    "Llama-2-7B": (
        family("llama", **shape(4096, 11008, 32, 32, 32, 32000, 4096), pretraining_tp=1, rope_scaling=None),
        (128, None, False),
    ),
    "Llama-2-7B first": (
        {
            k: v
            for k, v in family("llama", **shape(4096, 11008, 32, 32, 32, 32000, 2048), pad_token_id=0).items()
            if k != "num_key_value_heads"
        },
        (128, None, False),
    ),
    "Llama-3-8B": (
        family("llama", **shape(4096, 14336, 32, 32, 8, 128256, 8192), **LLAMA, rope_theta=500000.0),
        (128, None, False),
    ),
    "Llama-3.1-8B": (
        family("llama", **shape(4096, 14336, 32, 32, 8, 128256, 131072), **LLAMA | {"rope_scaling": LLAMA3}),
        (128, None, False),
    ),
    "Llama-3.2-1B": (
        family(
            "llama",
            **shape(2048, 8192, 16, 32, 8, 128256, 131072),
            **LLAMA | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64, "tie_word_embeddings": True},
        ),
        (64, None, False),
    ),
    "SmolLM2-135M": (
        family(
            "llama",
            **shape(576, 1536, 30, 9, 3, 49152, 8192),
            **LLAMA,
            is_llama_config=True,
            rope_interleaved=False,
            rope_theta=100000,
            **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        ),
        (64, None, False),
    ),
    "Mistral-7B-v0.1": (
        family("mistral", **shape(4096, 14336, 32, 32, 8, 32000, 32768), rope_theta=10000.0, sliding_window=4096),
        (128, 4096, False),
    ),
    "Mistral-7B-v0.3": (
        family("mistral", **shape(4096, 14336, 32, 32, 8, 32768, 32768), rope_theta=1e6, sliding_window=None),
        (128, None, False),
    ),
    "Mistral-Nemo": (
        family("mistral", **shape(5120, 14336, 40, 32, 8, 131072, 131072), rope_theta=1e6, head_dim=128),
        (128, None, False),
    ),
    "Qwen2.5-7B": (
        family(
            "qwen2",
            **shape(3584, 18944, 28, 28, 4, 152064, 131072),
            max_window_layers=28,
            rope_theta=1e6,
            sliding_window=131072,
            use_sliding_window=False,
        ),
        (128, None, True),
    ),
    "Qwen2-7B windowed": (
        family(
            "qwen2",
            **shape(3584, 18944, 28, 28, 4, 152064, 131072),
            max_window_layers=20,
            rope_theta=1e6,
            sliding_window=4096,
            use_sliding_window=True,
            use_mrope=False,
        ),
        (128, 4096, True),
    ),
    "Qwen3-0.6B": (
        family(
            "qwen3",
            **shape(1024, 3072, 28, 16, 8, 151936, 40960),
            attention_bias=False,
            head_dim=128,
            max_window_layers=28,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            use_sliding_window=False,
        ),
        (128, None, False),
    ),
    "Phi-3-mini-4k": (
        family(
            "phi3",
            **shape(3072, 8192, 32, 32, 32, 32064, 4096),
            **PHI,
            _name_or_path="Phi-3-mini-4k-instruct",
            original_max_position_embeddings=4096,
            rope_scaling=None,
            rope_theta=10000.0,
            sliding_window=2047,
        ),
        (96, 2047, False),
    ),
    "Phi-3.5-mini": (
        family(
            "phi3",
            **shape(3072, 8192, 32, 32, 32, 32064, 131072),
            **PHI,
            attention_bias=False,
            original_max_position_embeddings=4096,
            rope_scaling=long_factors(48),
            rope_theta=10000.0,
            sliding_window=262144,
        ),
        (96, 262144, False),
    ),
    "Phi-4": (
        family(
            "phi3",
            **shape(5120, 17920, 40, 40, 10, 100352, 16384),
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            original_max_position_embeddings=16384,
            rope_scaling=None,
            rope_theta=250000,
            sliding_window=None,
        ),
        (128, None, False),
    ),
    "Phi-4-mini": (
        family(
            "phi3",
            **shape(3072, 8192, 32, 24, 8, 200064, 131072),
            **PHI,
            attention_bias=False,
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            mlp_bias=False,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rope_scaling=long_factors(48),
            rope_theta=10000.0,
            sliding_window=262144,
        ),
        (128, 262144, False),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load(name: str) -> None:
    raw, (head_dim, window, qkv_bias) = PUBLISHED[name]
    config = parse_config(raw, where=name)
    assert (config.head_dim, config.sliding_windows[-1], config.qkv_bias) == (head_dim, window, qkv_bias)
    assert config.num_key_value_heads == raw.get("num_key_value_heads", raw["num_attention_heads"])
    assert config.tie_word_embeddings == raw["tie_word_embeddings"]
    hash(config)


def base(**changes: Any) -> dict[str, Any]:
    return PUBLISHED["Llama-3.1-8B"][0] | changes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("num_experts", 8),
        ("num_local_experts", 8),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_interleaved", True),
        ("attention_multiplier", 0.0078125),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("use_qk_norm", True),
        ("is_causal", False),
        ("full_attn_mod", 2),
        ("query_pre_attn_scalar", 256),
        ("clip_qkv", 8.0),
        ("no_rope_layers", [1, 1, 0]),
        ("sliding_window", 4096),
        ("a_key_of_the_future", "on"),
        ("hidden_act", "gelu"),
        ("hidden_act", None),
        ("head_dim", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**9),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", ["llama"]),
        ("num_attention_heads", True),
        ("num_key_value_heads", 5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "big"),
        ("vocab_size", None),
        ("tie_word_embeddings", "yes"),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.01),
        ("rope_scaling", "llama3"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 32),
        ("layer_types", ["sliding_attention"] * 32),
    ],
)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as error:
        parse_config(base(**{key: value}), where="config.json")
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, False, 0, [], {}])
def test_an_unknown_key_that_is_switched_off_is_accepted(value: Any) -> None:
    assert parse_config(base(a_key_of_the_future=value), where="x") == parse_config(base(), where="x")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' is not supported; supported is one of default, linear"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "linear", "type": "default", "factor": 2.0}, "not supported"),
        ({"rope_type": "linear"}, "positive number 'factor', got None"),
        ({"rope_type": "linear", "factor": -1}, "got -1"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 0.7}, "'mscale' = 0.7"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor"),
        ({k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}, "original_max_position"),
        (long_factors(64), "'original_max_position_embeddings', which is missing"),
        (long_factors(63) | {"original_max_position_embeddings": 8192}, "needs 64 values of 'short_factor', got 63"),
        (long_factors(64) | {"original_max_position_embeddings": 8192, "factor": 4}, "disagrees"),
        (long_factors(64) | {"original_max_position_embeddings": 8192, "short_mscale": 1.2}, "short_mscale"),
        (long_factors(64) | {"original_max_position_embeddings": 8192, "long_factor": [0.0] * 64}, "positive"),
        (long_factors(64) | {"long_factor": None}, "long_factor"),
    ],
)
def test_rope_that_is_not_supported_or_incomplete_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(base(rope_scaling=scaling), where="config.json")


def test_layouts_that_disagree_are_refused() -> None:
    new = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_theta"):
        parse_config(base(rope_scaling=None, rope_parameters=new, rope_theta=5e5), where="x")
    with pytest.raises(ValueError, match="disagree"):
        parse_config(base(rope_parameters=new), where="x")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "qwen3_moe", "architectures": None}, "qwen3_moe"),
        ({"model_type": None, "architectures": None}, "None"),
    ],
)
def test_unsupported_architectures_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*LlamaForCausalLM, MistralForCausalLM"):
        parse_config(base(**changes), where="x")


@pytest.mark.parametrize(("name", "key"), [("Phi-4-mini", "attention_bias"), ("Qwen3-0.6B", "mlp_bias")])
def test_biases_that_the_architecture_does_not_have_are_refused(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse_config(PUBLISHED[name][0] | {key: True}, where="x")


def test_widths_that_do_not_divide_need_a_head_dim() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        parse_config(base(hidden_size=4100), where="x")
    config = parse_config(base(hidden_size=4100, head_dim=128), where="x")
    assert isinstance(config, ModelConfig)
