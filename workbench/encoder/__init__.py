"""Everything that touches torch or vLLM. Importing this package alone imports neither."""
