"""What makes a comparison of two runs doubtful, and what was changed on purpose, in sentences."""

from workbench.capturable import Ladder
from workbench.run import ConfigRecord, Environment, GpuState, ModelRecord, Run

CLOCK_TOLERANCE = 0.05  # share of a clock or power limit that may differ
HEAT_TOLERANCE = 10  # degrees Celsius


def environment_doubts(base: Environment, head: Environment) -> list[str]:
    """Differences of machine and software: hardware, versions, clocks, power, heat, neighbours."""
    doubts = [
        f"another {title}: {left} and {right}"
        for title, left, right in (
            ("CPU", base.cpu, head.cpu),
            ("number of CPUs", base.cpu_count, head.cpu_count),
            ("vLLM", base.vllm, head.vllm),
            ("vLLM commit", base.vllm_commit, head.vllm_commit),
            ("torch", base.torch, head.torch),
            ("CUDA runtime", base.cuda_runtime, head.cuda_runtime),
            ("Python", base.python, head.python),
            ("number of GPUs", len(base.gpus), len(head.gpus)),
        )
        if left != right
    ]
    changed = [
        f"{name} {base.packages.get(name, 'absent')} → {head.packages.get(name, 'absent')}"
        for name in sorted(base.packages.keys() | head.packages.keys())
        if base.packages.get(name) != head.packages.get(name)
    ]
    if changed:
        doubts.append(f"other packages: {', '.join(changed[:12])}" + (" and more" if len(changed) > 12 else ""))
    for left, right in zip(base.gpus, head.gpus, strict=False):
        doubts += _gpu_doubts(left, right)
    return doubts


def _gpu_doubts(base: GpuState, head: GpuState) -> list[str]:
    doubts = []
    for field, title in (("name", "GPU"), ("driver", "driver"), ("cuda_driver", "CUDA driver")):
        left, right = getattr(base, field), getattr(head, field)
        if left != right:
            doubts.append(f"another {title}: {left} and {right}")
    for field, title, unit in (
        ("sm_clock_mhz", "SM clock", "MHz"),
        ("memory_clock_mhz", "memory clock", "MHz"),
        ("max_sm_clock_mhz", "largest SM clock", "MHz"),
        ("power_limit_w", "power limit", "W"),
    ):
        left, right = getattr(base, field), getattr(head, field)
        if left and right and abs(right / left - 1) > CLOCK_TOLERANCE:
            doubts.append(f"another {title}: {left} and {right} {unit}")
    left, right = base.temperature_c, head.temperature_c
    if left is not None and right is not None and abs(left - right) > HEAT_TOLERANCE:
        doubts.append(f"another temperature: {left} and {right} °C")
    for side, gpu in (("base", base), ("head", head)):
        if gpu.other_processes:
            doubts.append(f"{side}: {gpu.other_processes} other processes were on the GPU")
    return doubts


def made_doubts(base: Run | Ladder, head: Run | Ladder) -> list[str]:
    """Differences of what ran and when: the day, weights, attention backend, inputs, warm-up."""
    doubts = []
    if base.created[:10] != head.created[:10]:
        doubts.append(f"measured on other days: {base.created[:10]} and {head.created[:10]}")
    if base.model.weights_fingerprint != head.model.weights_fingerprint:
        doubts.append("the weights differ")
    if base.model.attention_backend != head.model.attention_backend:
        doubts.append(f"another attention backend: {base.model.attention_backend} and {head.model.attention_backend}")
    if base.seed != head.seed:
        doubts.append(f"another seed of the inputs: {base.seed} and {head.seed}")
    if base.warmup != head.warmup:
        doubts.append(f"another number of warm-up calls: {base.warmup} and {head.warmup}")
    return doubts


def differences(base: Run, head: Run) -> list[str]:
    """What was changed: configuration, model, weights, workload, versions; only what differs."""
    model, software = _model(base, head), _software(base, head)
    workload = ("workload", base.workload, head.workload)
    bench = ("workbench", base.workbench, head.workbench)
    return _told([*_configuration(base.config, head.config), *model, workload, *software, bench])


def ladder_differences(base: Ladder, head: Ladder) -> list[str]:
    """The same of two ladders: budgets, model, weights, versions."""
    fields = ("budgets", "max_items", "max_frames")
    configuration = [(field.replace("_", " "), getattr(base, field), getattr(head, field)) for field in fields]
    return _told([*configuration, *_model(base, head), *_software(base, head)])


_Pair = tuple[str, object, object]  # what is compared, the base's and the head's


def _told(pairs: list[_Pair]) -> list[str]:
    return [f"{title}: {_shown(left)} → {_shown(right)}" for title, left, right in pairs if left != right]


def _model(base: Run | Ladder, head: Run | Ladder) -> list[_Pair]:
    fields = ("architecture", "depth", "width", "dtype", "attention_backend")
    return [
        ("model", base.model.key, head.model.key),
        *((field.replace("_", " "), getattr(base.model, field), getattr(head.model, field)) for field in fields),
        ("weights", *_weights(base.model, head.model)),
    ]


def _software(base: Run | Ladder, head: Run | Ladder) -> list[_Pair]:
    left, right = base.environment, head.environment
    return [
        ("replay", base.replay, head.replay),
        ("vLLM", left.vllm, right.vllm),
        ("vLLM commit", left.vllm_commit, right.vllm_commit),
        ("torch", left.torch, right.torch),
    ]


def _configuration(base: ConfigRecord, head: ConfigRecord) -> list[_Pair]:
    """Fields as vLLM resolved them; as asked only where that alone differs."""
    resolved = [field for field in base.__struct_fields__ if not field.startswith("requested_")]
    rows = []
    for field in resolved:
        name, asked = field.replace("_", " "), f"requested_{field}"
        left, right = getattr(base, field), getattr(head, field)
        rows.append((name, left, right))
        if left == right and asked in base.__struct_fields__:
            rows.append((f"{name} asked for", getattr(base, asked), getattr(head, asked)))
    return rows


def _weights(base: ModelRecord, head: ModelRecord) -> tuple[str, str]:
    """The weights in words, with the beginning of their fingerprints where the words are the same."""
    if base.weights != head.weights:
        return base.weights, head.weights
    left, right = (f"{model.weights} ({model.weights_fingerprint[:12]})" for model in (base, head))
    return left, right


def _shown(value: object) -> str:
    """A value in words: a list without brackets."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
