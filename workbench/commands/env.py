"""`workbench env`: what this machine is and what can be measured on it."""

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `env`."""

    @app.command("env")
    def env(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
        """Say what can run here (live capture, static replay, recordings only), and why."""
        import msgspec

        from workbench.environment import MODE_TITLES, capability, describe, environment

        machine = environment()
        can = capability(machine)
        if as_json:
            result = {"environment": machine, "mode": can.mode, "reason": can.reason}
            print(msgspec.json.format(msgspec.json.encode(result)).decode())
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None)
        table.add_column(style="bold")
        table.add_column()
        for name, value in describe(machine):
            table.add_row(name, value)
        console = Console(highlight=False)
        console.print(table)
        console.print(f"\n[bold]{MODE_TITLES[can.mode]}[/]: {can.reason}.")
