"""What a checkpoint says about its model: one frozen `ModelConfig` from a Hugging Face `config.json` or GGUF metadata.

A configuration key is read, known to be harmless at inference, or refused: a key that nobody here has looked at may
change the mathematics, and a model that is evaluated under the wrong mathematics gives plausible, wrong numbers.
A refused key whose value is null, false, 0 or empty is taken as switched off.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.rope import Rope, make_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}

_READ = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "original_max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types",
}  # fmt: skip
# Says how the model was trained, stored or is to be called; no effect on the logits of given tokens.
_HARMLESS = {
    "_attn_implementation", "_from_model_config", "_name_or_path", "attention_dropout", "attn_implementation",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "hidden_dropout",
    "id2label", "initializer_range", "is_llama_config", "label2id", "license", "pad_token_id", "pretraining_tp",
    "resid_pdrop", "return_dict", "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip
# Neutral only at this value (Phi-4-mini's config.json has the first two).
_NEUTRAL = {"full_attn_mod": 1, "interpolate_factor": 1, "is_causal": True, "is_decoder": True}
_MUST_BE_TRUE = {"is_causal"}  # an explicit false here is not "off" but another attention

_HIDDEN_ACTS = ("silu", "swish")
DEFAULT_ROPE_THETA = 10000.0  # of every supported class in Transformers; Llama 2's config.json relies on it
MOST_LAYERS = (
    10_000  # every layer's tensors are listed before the file is read; damaged metadata may ask for any number
)


@dataclass(frozen=True)
class ModelConfig:
    """The mathematics of one decoder. Names are those of `config.json`, as a reader of a paper meets them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one a layer; None: the layer sees every earlier token


def read_config(path: Path, *, context: int | None = None) -> ModelConfig:
    """Parses the `config.json` at `path`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); copy the file again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold one JSON object, got {type(raw).__name__}")
    return parse_config(raw, where=str(path), context=context)


def parse_config(raw: Mapping[str, Any], *, where: str, context: int | None = None) -> ModelConfig:
    """A `ModelConfig` from the content of a `config.json`, in the layout of 2024–25 or the newest."""
    architecture = _architecture(raw, where)
    _refuse_unknown(raw, architecture, where)
    if raw.get("hidden_act") not in _HIDDEN_ACTS:
        raise ValueError(f"{where}: hidden_act = {raw.get('hidden_act')!r} is not supported; supported is 'silu'")

    layers, heads = _count(raw, "num_hidden_layers", where), _count(raw, "num_attention_heads", where)
    hidden = _count(raw, "hidden_size", where)
    if raw.get("num_key_value_heads") is None and architecture in ("llama", "phi3"):
        kv_heads = heads  # the default of these two classes, and only of these
    else:
        kv_heads = _count(raw, "num_key_value_heads", where)
    if heads % kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim", where)
    elif architecture == "qwen3":  # its class default is 128, whatever the width
        head_dim = 128
    elif hidden % heads:
        raise ValueError(
            f"{where}: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no "
            "head_dim"
        )
    else:
        head_dim = hidden // heads
    max_position = _count(raw, "max_position_embeddings", where)
    attention_bias, mlp_bias = _flag(raw, "attention_bias", where), _flag(raw, "mlp_bias", where)
    if attention_bias and architecture in ("mistral", "phi3"):
        raise ValueError(f"{where}: attention_bias = True is not supported for {architecture!r}; supported is false")
    if mlp_bias and architecture != "llama":
        raise ValueError(f"{where}: mlp_bias = True is not supported for {architecture!r}; supported is false")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size", where),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, "rms_norm_eps", where),
        max_position_embeddings=max_position,
        rope=_rope(raw, head_dim, max_position, context, where),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", where),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias and architecture in ("llama", "qwen3"),
        mlp_bias=mlp_bias,
        qk_norm=architecture == "qwen3",
        sliding_windows=_sliding_windows(raw, architecture, layers, where),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    model_type = raw.get("model_type")
    classes = raw.get("architectures") or []
    supported = ", ".join(ARCHITECTURES.values())
    if not isinstance(classes, list):
        raise ValueError(f"{where}: 'architectures' must be a list of names, got {classes!r}")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        named = classes[0] if classes else model_type
        raise ValueError(
            f"{where}: architecture {named!r} (model_type = {model_type!r}) is not supported; supported are {supported}"
        )
    for name in classes:
        if name != ARCHITECTURES[model_type]:
            raise ValueError(
                f"{where}: architecture {name!r} is not supported (model_type = {model_type!r}); supported are "
                f"{supported}"
            )
    return str(model_type)


def _refuse_unknown(raw: Mapping[str, Any], architecture: str, where: str) -> None:
    for key, value in raw.items():
        if key in _READ or key in _HARMLESS or (key in _NEUTRAL and value == _NEUTRAL[key]):
            continue
        if key not in _MUST_BE_TRUE and (value is None or value == 0 or value == [] or value == {} or value == ""):
            continue
        supported = f"only {_NEUTRAL[key]!r} is" if key in _NEUTRAL else "only models without it are"
        raise ValueError(
            f"{where}: configuration key {key!r} = {value!r} may change the mathematics of {architecture!r} and is not "
            f"supported; {supported}"
        )


def _count(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{where}: {key!r} must be a positive integer, got {value!r}")
    if key == "num_hidden_layers" and value > MOST_LAYERS:
        raise ValueError(f"{where}: {key!r} must be at most {MOST_LAYERS}, got {value}; the file is damaged")
    return value


def _positive(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {key!r} must be a positive number, got {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    """A flag that is absent is false: the default of every supported class for the flags read here."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key!r} must be true or false, got {value!r}")
    return bool(value)


def _rope(raw: Mapping[str, Any], head_dim: int, max_position: int, context: int | None, where: str) -> Rope:
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{where}: {key!r} must be an object or null, got {value!r}")
    if new and old and any(new.get(key) != value for key, value in old.items()):
        raise ValueError(f"{where}: 'rope_parameters' = {new!r} and 'rope_scaling' = {old!r} disagree; keep one")
    params: Mapping[str, Any] = new or old or {}

    def one(key: str, default: float) -> float:
        """The value in the rope dictionary (newest layout) or beside it (2024–25)."""
        values = [_positive(source, key, where) for source in (params, raw) if source.get(key) is not None]
        if len(set(values)) > 1:
            raise ValueError(f"{where}: {key!r} is {values[0]} in the rope dictionary and {values[1]} beside it")
        return values[0] if values else default

    original = raw.get("original_max_position_embeddings")
    return make_rope(
        params,
        theta=one("rope_theta", DEFAULT_ROPE_THETA),
        head_dim=head_dim,
        partial_rotary_factor=one("partial_rotary_factor", 1.0),
        max_position=max_position,
        original_max_position=None if original is None else _count(raw, "original_max_position_embeddings", where),
        context=context,
        where=where,
    )


def _sliding_windows(raw: Mapping[str, Any], architecture: str, layers: int, where: str) -> tuple[int | None, ...]:
    """The window of each layer.

    `layer_types` decides where it is given. Otherwise Mistral and Phi-3 apply `sliding_window` to every layer, and
    Qwen to the layers from `max_window_layers` on, only with `use_sliding_window`.
    """
    window = None if raw.get("sliding_window") is None else _count(raw, "sliding_window", where)
    if architecture == "llama" and window is not None:
        raise ValueError(f"{where}: sliding_window = {window} is not supported for 'llama'; supported is null")
    if architecture in ("qwen2", "qwen3") and not _flag(raw, "use_sliding_window", where):
        window = None
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{where}: 'layer_types' must be a list of {layers} names, got {kinds!r}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"{where}: layer_types holds {kind!r}, which is not supported; supported are 'full_attention' and "
                    "'sliding_attention'"
                )
        if "sliding_attention" in kinds and window is None:
            raise ValueError(f"{where}: layer_types holds 'sliding_attention', but no sliding_window is in force")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture in ("qwen2", "qwen3") and window is not None:
        first = raw.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"{where}: use_sliding_window needs an integer 'max_window_layers', got {first!r}")
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window,) * layers
