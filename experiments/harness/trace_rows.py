"""A `Trace` as result rows, one a regime, after checks that it is a result at all."""

import dataclasses
from typing import Any

import numpy as np

import kvq_jax as kvq
from experiments.harness.statistics import bootstrap_interval, by_bucket, estimate, interval, samples

Row = dict[str, Any]

# Two orders of the same float32 sum move the attention output by less than this part of it; 8 bits, by 100 times more.
NOISE = 1e-5


def rows(trace: kvq.Trace, *, skip: int, bucket: int, seed: int) -> list[Row]:
    """One row a regime. Means are over valid positions >= skip; curves by bucket are over all valid positions.

    Raises ValueError where a number is not finite, and where a method that claims to quantize changed nothing.
    """
    fields = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
    on_host: dict[str, Any] = {name: np.asarray(x) for name, x in fields.items() if hasattr(x, "dtype")}
    trace = dataclasses.replace(trace, **on_host)
    check_finite(trace)
    counted = np.asarray(trace.valid & (np.arange(trace.valid.shape[1]) >= skip))
    if not (counted & np.asarray(trace.scored)).any():
        raise ValueError(f"--skip_positions={skip} leaves none of {trace.valid.shape[1]} positions; pass a smaller one")
    check_changed(trace, counted)
    return [_row(trace, regime, counted, bucket, seed) for regime in range(len(trace.regimes))]


def _first_bad(curve: Any, counted: Any) -> tuple[int, int] | None:
    """(layer, position) of the first position, then layer, that is not finite; curve `[layers, batch, N]`."""
    bad = (~np.isfinite(np.asarray(curve)) & np.asarray(counted)).any(axis=1)
    position = int(bad.any(axis=0).argmax())
    return (int(bad[:, position].argmax()), position) if bad.any() else None


def check_finite(trace: kvq.Trace) -> None:
    """Raise ValueError naming method, regime, layer and position of the first number that is not finite."""
    of_model = "pass --dtype=float32, and check the checkpoint if that is what ran"
    of_method = "pass --dtype=float32, more bits, or wider scales of the method"
    who = f"{trace.scheme}, block size {trace.block}"
    runs = [(f"{who}, unquantized reference", of_model, trace.attention_scale, trace.nll_reference, trace.scored)]
    for regime, mae, kl in zip(trace.regimes, trace.attention_mae, trace.kl, strict=True):
        runs.append((f"{who}, {regime}", of_method, mae, kl, trace.valid))
    for name, remedy, attention, curve, counted in runs:
        if found := _first_bad(attention, trace.valid):
            raise ValueError(f"{name}: attention is not finite from position {found[1]}, layer {found[0]}; {remedy}")
        if found := _first_bad(np.asarray(curve)[None], counted):
            raise ValueError(f"{name}: the logits are not finite from position {found[1]}; {remedy}")


def check_changed(trace: kvq.Trace, counted: np.ndarray) -> None:
    """Raise ValueError where a method that claims to quantize changed nothing: that is no perfect result."""
    if not trace.scheme.quantizes:
        return
    who = f"{trace.scheme}, block size {trace.block}"
    if not np.asarray(trace.quantized_tokens).any():
        raise ValueError(f"{who}: no token was quantized; pass more --num_tokens, or a smaller --sink or --recent")
    for regime, kl, mae in zip(trace.regimes, trace.kl, trace.attention_mae, strict=True):
        moved = np.asarray(mae)[:, counted].mean() / np.asarray(trace.attention_scale)[:, counted].mean()
        if not np.asarray(kl)[counted].any() or moved < NOISE:
            most = np.abs(np.asarray(kl)[counted]).max()
            raise ValueError(
                f"{who}, {regime}: the attention output moves by {moved:.1e} of its size and the KL is at most "
                f"{most:.1e} nats, so that what was quantized was never read; pass more --num_tokens, or fewer "
                "--skip_positions"
            )


def _mean(x: np.ndarray) -> float:
    """Mean over the layers that were quantized (the others are NaN)."""
    return float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else float("nan")


def _row(trace: kvq.Trace, regime: int, counted: np.ndarray, bucket: int, seed: int) -> Row:
    valid, scored = np.asarray(trace.valid), counted & np.asarray(trace.scored)
    kl, mae = np.asarray(trace.kl[regime]), np.asarray(trace.attention_mae[regime])
    scale = np.asarray(trace.attention_scale)
    last_block = np.arange(valid.shape[1]) >= (valid.shape[1] - 1) // trace.block * trace.block
    row: Row = {
        "method": str(trace.scheme),
        "regime": trace.regimes[regime],
        "block_size": trace.block,
        "positions_counted": int(counted.sum()),
    }

    mean = estimate(kl, counted)
    row["kl_nats_lo"], row["kl_nats_hi"] = interval(kl, counted, seed=seed)
    last = estimate(kl, valid & last_block)
    row |= {"kl_nats": mean.mean, "kl_nats_sem": mean.sem, "kl_nats_sem_over": mean.over}
    row |= {"kl_nats_last_block": last.mean, "kl_nats_last_block_sem": last.sem}
    buckets = by_bucket(kl, valid, bucket)
    row["bucket_start"] = list(range(0, valid.shape[1], bucket))
    row |= {"kl_by_bucket": [b.mean for b in buckets], "kl_by_bucket_sem": [b.sem for b in buckets]}

    agreement = estimate(trace.agree[regime], counted)
    row |= {"top1_agreement": agreement.mean, "top1_agreement_sem": agreement.sem}
    low_high = interval(trace.agree[regime], counted, seed=seed)
    row["top1_agreement_lo"], row["top1_agreement_hi"] = low_high
    for name, nll in (("perplexity", trace.nll[regime]), ("perplexity_reference", trace.nll_reference)):
        x, _ = samples(nll, scored)
        low, high = np.exp(bootstrap_interval(x, seed=seed))
        row |= {name: float(np.exp(x.mean())), f"{name}_lo": float(low), f"{name}_hi": float(high)}
    row["nll_by_bucket"] = [b.mean for b in by_bucket(trace.nll[regime], valid & np.asarray(trace.scored), bucket)]

    attention, curve = mae.mean(axis=0), by_bucket(mae.mean(axis=0), valid, bucket)
    error = estimate(attention, counted)
    by_layer, scale_by_layer = mae[:, counted].mean(axis=-1), scale[:, counted].mean(axis=-1)
    row |= {"attention_mae": error.mean, "attention_mae_sem": error.sem}
    row["attention_error_relative"] = float((by_layer / scale_by_layer).mean())
    row |= {"attention_mae_by_bucket": [b.mean for b in curve], "attention_mae_by_bucket_sem": [b.sem for b in curve]}
    row |= {"attention_mae_by_layer": by_layer.tolist(), "attention_scale_by_layer": scale_by_layer.tolist()}

    for name in ("key_relative_mse", "key_norm_ratio_mean", "value_relative_mse"):
        row[name] = _mean(np.asarray(getattr(trace, name)[regime]))
        row[f"{name}_by_layer"] = np.asarray(getattr(trace, name)[regime]).tolist()
    # over a layer's tokens: the root mean square over layers, so that layers of different means do not add to it
    row["key_norm_ratio_std"] = float(np.sqrt(_mean(np.square(np.asarray(trace.key_norm_ratio_std[regime])))))

    quantized = np.asarray(trace.quantized_tokens)
    row |= {
        "bits_per_element_store": trace.bits["store"],
        "bits_per_element_cache": trace.bits["cache"],
        "cache_bytes": sum(trace.cache_bytes.values()),
        "cache_bytes_by_leaf": trace.cache_bytes,
        "layers": len(quantized),
        "layers_quantized": int((quantized > 0).sum()),
        "quantized_tokens_by_layer": quantized.tolist(),
        "packed": trace.scheme.packed,
        "implementation": trace.implementation,
    }
    return row
