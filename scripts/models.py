#!/usr/bin/env python3
"""Write the generated table of docs/models.md from the installed vLLM; with --check, only say whether it is current.

    .venv/bin/python scripts/models.py [--check]

The table depends on vLLM's version, so `--check` needs the CPU engine of pyproject.toml.
"""

import argparse
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
REGION = re.compile(r"(<!-- generated: coverage -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; return 0, or 1 where `--check` finds it out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if out of date")
    check = parser.parse_args(arguments).check
    from workbench.encoder.coverage import table

    before = PAGE.read_text()
    made = table()
    after = REGION.sub(lambda found: found[1] + made + found[2], before)
    if made not in after:
        sys.exit(f"{PAGE} has no region <!-- generated: coverage -->")
    if before == after:
        return 0
    if check:
        print(f"{PAGE.name} is out of date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
