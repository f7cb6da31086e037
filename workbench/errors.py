"""The one exception that reaches a person."""


class WorkbenchError(Exception):
    """One sentence: what was wrong with which input, and what to do next.

    The command line prints it without a traceback and exits with code 2.
    """


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy or torch does not take."""
    if not 0 <= seed < 2**63:
        raise WorkbenchError(f"seed {seed} is not between 0 and {2**63 - 1}; choose another")
