"""Command-line verbs, one module per group; bodies import what they need when they run."""
