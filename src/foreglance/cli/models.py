"""`foreglance models`: what ships with the package, what is supported, what lies in the hub's cache and in ours. No
network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foreglance.cli.options import JsonOption, takes
from foreglance.cli.running import hush
from foreglance.cli.show import print_json, to_stdout

HEADS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # how configs count draft modules


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(JsonOption):
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Remove the quantised weights that are kept on disk, before all else.")
    ] = False


@takes(ModelsOptions)
def models(options: ModelsOptions) -> None:
    """List embedded models, supported families and what is cached locally."""
    hush()
    from foreglance.models import weight_cache
    from foreglance.models.registry import FAMILIES
    from foreglance.models.weights import EMBEDDED, embedded_models

    supported = {kind for family in FAMILIES for kind in family.model_types}
    found = {
        "embedded": [
            _describe(name, EMBEDDED / name, f"{name}-assistant" in embedded_models()) for name in embedded_models()
        ],
        "families": [{"title": family.title, "model_types": list(family.model_types)} for family in FAMILIES],
        "cached": [_describe(name, folder) for name, folder in _cached() if _model_type(folder) in supported],
        "weight_cache": {
            "folder": str(weight_cache.cache_folder()),
            "removed_bytes": weight_cache.clear() if options.clear_cache else 0,
            "bytes": weight_cache.held(),
        },
    }
    show = print_json if options.json else _show
    show(found)


def _describe(name: str, folder: Path, has_assistant: bool = False) -> dict:
    """`draft_heads` counts the modules inside the checkpoint; `drafts` says in words who drafts for it."""
    config = _config(folder)
    text = config.get("text_config", config)
    heads = max((scope.get(key) or 0 for scope in (config, text) for key in HEADS), default=0)
    words = f"{heads} MTP modules" if heads > 1 else "MTP head" if heads else "-"
    return {
        "name": name,
        "model_type": _model_type(folder),
        "images": "vision_config" in config,
        "draft_heads": heads,
        "drafts": "its assistant" if has_assistant else words,
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }


def _config(folder: Path) -> dict[str, Any]:
    """A cache may hold a model in part, or a broken file; such a folder has no config."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _model_type(folder: Path) -> str:
    return _config(folder).get("model_type", "")


def _cached() -> Iterator[tuple[str, Path]]:
    """Hub name and newest snapshot of each model in the hub's cache; nothing where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            yield repo.repo_id, max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path


def _show(found: dict) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("model", "where", "type", "images", "drafts", "size"):
        table.add_column(title, overflow="fold")  # names are there to be copied
    for where in ("embedded", "cached"):
        for one in found[where]:
            told = one["model_type"], "yes" if one["images"] else "no", one["drafts"], f"{one['bytes'] / 1e6:.1f} MB"
            table.add_row(one["name"], where, *told)
    console = to_stdout()
    console.print(table if table.row_count else "no embedded and no cached models")
    console.print("\nsupported families")
    for family in found["families"]:
        console.print(f"  {family['title']}: model_type {', '.join(family['model_types'])}", markup=False)
    kept = found["weight_cache"]
    removed = f" ({kept['removed_bytes'] / 1e6:.1f} MB were removed)" if kept["removed_bytes"] else ""
    console.print(
        f"\nquantised weights kept in {kept['folder']}: {kept['bytes'] / 1e6:.1f} MB{removed}",
        markup=False,
        soft_wrap=True,
    )
