"""What the workbench itself costs; each module has a `main()` that writes JSON to --out."""
