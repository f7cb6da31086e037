"""Distance of two outputs, and the fingerprint of inputs."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from workbench.parity import Difference


def compare(output: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compare one item's (tokens, width) output with its reference, in float32.

    An output of another shape has no distance: it is reported as not finite and not equal.
    """
    if output.shape != reference.shape:
        return Difference(
            tokens=int(reference.shape[0]),
            bit_equal=False,
            finite=False,
            max_abs=None,
            relative_rms=None,
            worst_row=None,
            min_cosine=None,
        )
    a, b = output.detach().float(), reference.detach().float()
    delta = a - b
    scale = b.square().mean().sqrt()
    rows = delta.square().mean(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    # One transfer for all of it.
    values = torch.stack(
        [
            delta.abs().amax(),
            rows.mean().sqrt() / scale,
            rows.amax().sqrt() / scale,
            cosine.amin(),
            torch.isfinite(a).all().float(),
            (a == b).all().float(),
        ]
    ).tolist()
    max_abs, relative_rms, worst_row, min_cosine = (x if math.isfinite(x) else None for x in values[:4])
    return Difference(
        tokens=int(reference.shape[0]),
        bit_equal=bool(values[5]),
        finite=bool(values[4]),
        max_abs=max_abs,
        relative_rms=relative_rms,
        worst_row=worst_row,
        min_cosine=min_cosine,
    )


def fingerprint(values: Any, digest: Any = None) -> str:
    """SHA-256 over tensors and plain values nested in dicts and sequences, keys in order of their names."""
    digest = digest or hashlib.sha256()
    if isinstance(values, torch.Tensor):
        digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(values, dict):
        for key in sorted(values):
            digest.update(str(key).encode())
            fingerprint(values[key], digest)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            fingerprint(value, digest)
    else:
        digest.update(repr(values).encode())
    return str(digest.hexdigest())
