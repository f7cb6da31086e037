"""`python -m workbench`: the command line without an installed script."""

from workbench.cli import main

if __name__ == "__main__":
    main()
