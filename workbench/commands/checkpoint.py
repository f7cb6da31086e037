"""`workbench checkpoint`: a model folder without weights, so that vLLM's own commands run anywhere."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `checkpoint`."""
    app.command("checkpoint")(checkpoint)


def checkpoint(
    model: Annotated[str, typer.Argument(help="Which model: ernie45_vl or glm4_1v.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    full: Annotated[
        bool, typer.Option("--full/--tiny", help="The vision tower's real dimensions, or two small layers.")
    ] = True,
    video_fps: Annotated[
        int | None,
        typer.Option(help="Frames a second that the processor samples from videos; left out: the model's own."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a folder without weights for `--load-format dummy`: config, byte-level tokenizer, processor.

    The language model in it is one small layer, so only the encoder's figures mean something.
    """
    from workbench.encoder.checkpoint import make_checkpoint
    from workbench.models import model_facts

    made = make_checkpoint(model_facts(model), out, full=full, video_fps=video_fps, overwrite=overwrite)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(made, enc_hook=str)).decode())
        return
    print(f"{out}: {len(made.files)} files without weights; start vLLM with --model {out} {' '.join(made.arguments)}")
