"""`foreglance export-gguf`: a checkpoint as the files that llama.cpp reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foreglance.cli.options import DEFAULT_MODEL, JsonOption, takes
from foreglance.cli.running import hush
from foreglance.cli.show import print_json, to_stdout
from foreglance.request import RequestError


@dataclass(frozen=True, kw_only=True)
class ExportOptions(JsonOption):
    model: Annotated[str, typer.Option("--model", help="Embedded model, checkpoint folder or hub name.")] = (
        DEFAULT_MODEL
    )
    out: Annotated[Path, typer.Option("--out", help="File for the model.")]
    mmproj: Annotated[
        Path | None, typer.Option("--mmproj", help="File for the vision tower; default: not written.")
    ] = None
    draft: Annotated[
        Path | None, typer.Option("--draft", help="File for the draft head alone; default: it is part of the model.")
    ] = None
    type: Annotated[str, typer.Option("--type", help="Of matrices: f32, f16, bf16, q8_0 or q4_0.")] = "f16"


@takes(ExportOptions)
def export_gguf(options: ExportOptions) -> None:
    """Write a checkpoint as GGUF, which llama.cpp reads."""
    hush()
    from foreglance.models.base import ModelError
    from foreglance.models.gguf.export import export
    from foreglance.models.weights import find_model

    try:
        written = export(find_model(options.model), options.out, options.mmproj, options.draft, options.type)
    except ModelError as error:
        raise RequestError(str(error), param="model", code="model_unusable") from error
    except OSError as error:
        raise RequestError(str(error), param="out", code="not_written") from error
    if options.json:
        print_json({"written": [{"path": str(path), "bytes": path.stat().st_size} for path in written]})
    else:
        for path in written:
            to_stdout().print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", markup=False)
