"""Planted faults: mutations of the encoder or its manager at run time, and whether the lab catches them.

A fault is a context manager that patches one model object and one manager object; nothing of vLLM's classes or files
changes. Each is planted before a manager captures, so that a CUDA graph holds it too. Faults of the graph's own code
act inside `encoder_cudagraph_forward` only, so eager as served stays right.

A fault counts as caught when the lab reports anything and the suspect it names first is one of the expected.
"""

from workbench.encoder.parity.faults import buffers, forward, packing, replay, results, variants  # they register
from workbench.encoder.parity.faults.planting import FAULTS, Fault
from workbench.encoder.parity.faults.trial import Sentinel, baseline, run_battery, try_fault, untested

__all__ = [
    "FAULTS",
    "Fault",
    "Sentinel",
    "baseline",
    "buffers",
    "forward",
    "packing",
    "replay",
    "results",
    "run_battery",
    "try_fault",
    "untested",
    "variants",
]
