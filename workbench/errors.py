"""The one exception that reaches a person."""


class WorkbenchError(Exception):
    """One sentence: what was wrong with which input, and what to do next.

    The command line prints it without a traceback and exits with code 2.
    """
