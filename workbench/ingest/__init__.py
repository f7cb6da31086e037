"""What other tools measured, in one form: vLLM's benchmarks, lmms-eval, Nsight Systems, Kineto traces.

    read_external(Path("baseline.json"))      # an `External`
    nsys_trace(Path("profile.sqlite"))        # the same columns as `workbench.trace.read_trace`

A file is told by its content. What is not known is refused in one sentence.
"""

from workbench.ingest.external import Accuracy, External, KernelCount, Measure
from workbench.ingest.nsys import nsys_trace
from workbench.ingest.reader import read_external

__all__ = ["Accuracy", "External", "KernelCount", "Measure", "nsys_trace", "read_external"]
