"""Profiling and investigation workbench for vLLM's vision-encoder (ViT) CUDA graphs.

Importing the package imports neither torch nor vLLM: a laptop can plan, lint and read traces and
bundles. Everything that touches vLLM lives in `workbench.encoder`.
"""

__version__ = "0.1.0"
