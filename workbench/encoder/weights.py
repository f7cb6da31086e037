"""Weights of an encoder: seeded dummy values, or a checkpoint's vision tensors through vLLM's own loading.

Import this module only after `engine.require_vllm`.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import WorkbenchError
from workbench.files import read_json

_INDEX = "model.safetensors.index.json"
_BLOCK = re.compile(r"\.blocks\.(\d+)\.")

# Dummy weights decide which faults a comparison can see. Every matrix has the standard deviation 1 / sqrt(fan-in) times
# these gains, norms are one, and all biases zero but those of queries and keys. How many times a fault's relative RMS
# exceeds that of rounding, in the lab's own items (`matrix.visibility`), on the CPU in bf16 where not said otherwise:
#
#                                     attention removed   rotary of the transposed grid   rounding itself
#   ERNIE-4.5-VL, depth 2, two heads          39                         43                     0.010
#   ERNIE-4.5-VL, full size                   41                         35                     0.021
#   GLM-4.1V, depth 2, two heads              30                         28                     0.012
#   GLM-4.1V, full size, H200                 22                         21                     0.046
#   ERNIE-4.5-VL, full size, H200, with zero biases and the gain of GLM: 29 and 15, rounding 0.028
#
# On a GPU another batch composition rounds differently too, which raises the floor by up to the square root of two.
# With unit gains attention is nearly uniform and hides a wrong rotary embedding; a gain of 2 makes 24 blocks amplify
# rounding until nothing can be told apart (GLM-4.1V: 0.70). Biases make attention depend on positions alone, which
# amplifies nothing; GLM-4.1V has none. tests/test_weights.py and test_parity_lab.py hold depth 2 at 20 times and more.
_ATTENTION_GAIN = 1.5  # of the queries' and keys' weights, where they have no bias
_BIASED_GAIN = 1.0  # where they have one
_BIAS = 2.2  # its standard deviation
_RESIDUAL_GAIN = 0.5  # of what a block adds to the residual
_RESIDUAL_WEIGHTS = (".attn.proj.weight", ".mlp.fc2.weight", ".mlp.linear_fc2.weight", ".mlp.down_proj.weight")


def fill_dummy(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter of `model` from `seed`, the same values on every device."""
    parameters = dict(_parameters(model))
    with torch.no_grad():
        for name, parameter in parameters.items():
            biased = name.removesuffix("weight") + "bias" in parameters
            parameter.copy_(_dummy(name, parameter, seed, _BIASED_GAIN if biased else _ATTENTION_GAIN))


def _dummy(name: str, parameter: torch.nn.Parameter, seed: int, attention_gain: float) -> torch.Tensor:
    layer = name.rsplit(".", 2)[-2]
    if "norm" in layer or layer in ("ln", "ln_q"):
        return torch.full(parameter.shape, float(name.endswith("weight")))
    if parameter.ndim == 1 and layer != "qkv":
        return torch.zeros(parameter.shape)
    std = _BIAS if parameter.ndim == 1 else 1 / math.sqrt(parameter[0].numel())
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
    raw = np.frombuffer(generator.bytes(parameter.numel()), dtype=np.int8)
    values = torch.from_numpy(raw.copy()).to(torch.float32).add_(0.5).mul_(std / 73.9)
    values = values.reshape(parameter.shape)
    if name.endswith(".qkv.weight"):
        values[: 2 * parameter.shape[0] // 3] *= attention_gain
    elif name.endswith(".qkv.bias"):
        values[2 * parameter.shape[0] // 3 :] = 0
    elif name.endswith(_RESIDUAL_WEIGHTS):
        values *= _RESIDUAL_GAIN
    return values.to(torch.bfloat16)


def load_checkpoint(model: Any, parts: tuple[str, ...], depth: int, folder: Path) -> None:
    """Load the encoder's tensors from the safetensors files in `folder` through the model's own `load_weights`.

    Only tensors that vLLM's name mapper puts under `parts` are read, and of blocks only the first `depth`.

    Raises:
        WorkbenchError: no such files, or they do not hold exactly what the encoder needs.
    """
    mapper = type(model).hf_to_vllm_mapper
    files: dict[Path, list[str]] = {}
    for name, file in _tensor_files(folder).items():
        target = mapper.map_name(name)
        if target is not None and target.startswith(tuple(f"{part}." for part in parts)):
            block = _BLOCK.search(target)
            if block is None or int(block[1]) < depth:
                files.setdefault(file, []).append(name)
    if not files:
        raise WorkbenchError(
            f"checkpoint {folder} has no vision tensors (none is named {' or '.join(parts)}); "
            f"give the folder of a whole {type(model).__name__}"
        )
    with torch.no_grad():
        for _, parameter in _parameters(model):
            parameter.fill_(math.nan)  # finds tensors that are loaded in part, such as a gate without its up
    try:
        model.load_weights(_read(files))
    except (AssertionError, KeyError, RuntimeError, ValueError, SafetensorError, OSError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WorkbenchError(
            f"checkpoint {folder} does not fit {type(model).__name__} at this size: {told}; give the hub's folder of "
            "this model, and leave a reduced width out"
        ) from error
    missing = [name for name, parameter in _parameters(model) if bool(parameter.isnan().any())]
    if missing:
        raise WorkbenchError(
            f"checkpoint {folder} lacks {len(missing)} of the encoder's tensors, such as {missing[0]}; "
            "give a folder with all its safetensors files"
        )


def share(whole: Any, part_of: Any, parts: tuple[str, ...]) -> None:
    """Give the sharded model `part_of` this rank's share of `whole`'s weights, through vLLM's own weight loaders.

    Args:
        whole: the same encoder with all weights, not yet in their kernels' layout.
    """
    with torch.no_grad():
        for _, parameter in _parameters(part_of):
            parameter.fill_(math.nan)
        for name in parts:
            getattr(part_of, name).load_weights(
                (key, value.detach()) for key, value in getattr(whole, name).named_parameters()
            )
    left = [name for name, parameter in _parameters(part_of) if bool(parameter.isnan().any())]
    assert not left, f"vLLM's loader left {left[0]} unfilled"


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file, from the index if there is one, else from the files' headers."""
    if not folder.is_dir():
        raise WorkbenchError(f"checkpoint {folder} is not a folder; give the one that holds the safetensors files")
    index = folder / _INDEX
    if index.is_file():
        names = read_json(index, _Index).weight_map
        outside = [file for file in names.values() if Path(file).name != file]
        if outside:
            raise WorkbenchError(f"{index} points outside its folder, to {outside[0]!r}; repair the index")
        return {name: folder / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError) as error:
            raise WorkbenchError(f"{file} is not a safetensors file: {error}; download it again") from error
    if not found:
        raise WorkbenchError(f"checkpoint {folder} has no safetensors files; give the folder that holds them")
    return found


def _read(files: dict[Path, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in files.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                yield name, tensors.get_tensor(name)


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`; its metadata is ignored."""

    weight_map: dict[str, str]


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from sorted(model.named_parameters(), key=lambda item: item[0])


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and values of all parameters in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in _parameters(model):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def finish(model: torch.nn.Module) -> None:
    """Bring loaded weights into their kernels' layout, as vLLM does after loading.

    The CPU's linear layers keep only the packed form, so anything that reads weights comes before this.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
