"""Options that several commands share, each with a short placeholder, so that help fits a narrow terminal."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None, typer.Option(metavar="MODEL", help="A folder, a GGUF file, nano or smollm2. Default: nano.")
]
RealModel = Annotated[Path, typer.Option(metavar="MODEL", help="smollm2, a folder, or a GGUF file.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings; default: kedge.toml, if there is one here.")
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda. Default: auto.")]
ModelSize = Annotated[
    str, typer.Option(metavar="NAME", help="tiny, 32m, 100m or 8b: a Llama of that size with random weights.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file.")]

number = partial(typer.Option, metavar="N", min=1)
real = partial(typer.Option, metavar="X")
name = partial(typer.Option, metavar="NAME")
file = partial(typer.Option, metavar="FILE")
"""Options with a whole number from 1 on, a number, a name or a file."""
