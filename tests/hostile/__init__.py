"""Bundles that somebody made to do harm: a generator, and what each must meet."""
