"""Processes that tests start and end."""

from pathlib import Path


def runs(pid: str) -> bool:
    """Whether a process is there and has not ended; one that nobody has waited for yet has."""
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
