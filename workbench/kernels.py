"""Kernel names: which family of work one belongs to, and a name short enough for a table."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Family = Literal["gemm", "attention", "norm", "glue", "memcpy", "memset", "collective", "other"]
FAMILIES: tuple[Family, ...] = (
    "gemm", "attention", "norm", "glue", "memcpy", "memset", "collective", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A name that contains `pattern` (any case) is of `family`, because of `reason`."""

    family: Family
    pattern: str
    reason: str


# The first rule that matches decides; the order matters where names hold each other's words.
RULES: tuple[Rule, ...] = (
    Rule("memcpy", r"^Memcpy |^Copy(Host|Device)To(Host|Device)", "copy engine or driver copy"),
    Rule("memset", r"^Memset |^FillBuffer", "driver fill"),
    Rule("collective", r"nccl|rccl|cross_device_reduce|multimem_all|all_?reduce|all_?gather|reduce_?scatter",
         "communication between GPUs"),
    Rule("attention", r"flash|fmha|attention|_attn|attn_|prepare_varlen|softmax|(^|\W)_fwd_kernel|^_attend$",
         "attention and its scheduling; softmax where attention is unfused"),
    Rule("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|add_?norm|cuComputeMeanVar|RowwiseMoments",
         "normalisation over features, alone or fused with an add"),
    Rule("gemm", r"gemm|nvjet|gemv|splitKreduce|cublas|cutlass.*(Mma|Kernel2)|Cijk_|wgrad|dgrad|"
         r"conv(olution)?\d?d?_|cudnn|implicit_|triton_tem_fused.*mm|_matmul|matmul_|^_multiply$",
         "matrix products, convolutions and the reduction of their split parts"),
    Rule("glue", r"rotary|^_rotate$|act_and_mul|gelu|silu|quant", "position encoding and activation between products"),
    Rule("glue", r"elementwise|direct_copy|CatArray|index|gather|scatter|_fill|arange|transpose|permute|"
         r"copy_kernel|triton_(poi|red|per|for)_", "casts, copies, concatenation, element-wise and index work"),
    Rule("glue", r"at::native|at_cuda_detail|cub::|thrust::", "PyTorch's own small kernels: reductions, scans, sorts"),
)  # fmt: skip
_COMPILED = tuple((re.compile(rule.pattern, re.IGNORECASE), rule) for rule in RULES)

# What a generic wrapper really does is named inside its template arguments.
_WRAPPER = re.compile(r"elementwise_kernel|device_kernel|^Kernel2?$|kentry|reduce_kernel|index_elementwise")
_WORKER = re.compile(
    r"(?:\b|_)((?!gpu_kernel_impl)\w+_kernel_cuda|(?!gpu_kernel_impl)\w+_kernel_impl|\w*Functor\w*|FlashAttn\w+"
    r"|\w*Fmha\w*|GemmUniversal|\w+Ops\b)"
)


@lru_cache(maxsize=2**16)
def rule_of(name: str) -> Rule | None:
    """The rule that decides the family of the GPU op `name`; None for family "other"."""
    return next((rule for pattern, rule in _COMPILED if pattern.search(name[:4096])), None)


def family(name: str) -> Family:
    """Family of the GPU op `name`."""
    rule = rule_of(name)
    return rule.family if rule else "other"


@lru_cache(maxsize=2**16)
def short_name(name: str, limit: int = 60) -> str:
    """`name` without return type, namespaces, template arguments and parameters.

    A generic wrapper keeps, in brackets, the functor it runs. Copies keep their ends. At most
    `limit` characters.
    """
    if name.startswith(("Memcpy", "Memset")):
        return name[:limit]
    plain = name[:4096].replace("(anonymous namespace)::", "").removeprefix("void ")
    base = re.split(r"[<(]", plain, maxsplit=1)[0].rsplit("::", 1)[-1].strip() or plain
    if _WRAPPER.search(base) and (worker := _WORKER.search(plain, len(base))):
        base = f"{base}[{worker.group(1)}]"
    return base if len(base) <= limit else base[: limit - 1] + "…"
