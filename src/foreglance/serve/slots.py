"""`/slots`: what each slot holds; saving, restoring and erasing its conversation, as llama-server's clients know it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import fastapi
from fastapi import APIRouter

from foreglance.request import RequestError
from foreglance.serve.dispatch import stopped
from foreglance.serve.errors import ApiError, from_request_error, refused
from foreglance.serve.host import Host
from foreglance.serve.openai import Json as JsonObject
from foreglance.serve.schema import Error, SlotBody
from foreglance.serve.worker import WorkerStopped
from foreglance.slots import SlotInfo

if TYPE_CHECKING:
    from foreglance.engine import Engine

Answer = TypeVar("Answer")
SlotNumber = Annotated[str, fastapi.Path(json_schema_extra={"pattern": "^[0-9]{1,9}$"})]
Action = Annotated[str, fastapi.Query(json_schema_extra={"enum": ["save", "restore", "erase"]})]
STATUS = {"slot_busy": 409, "slot_unknown": 404, "slot_not_written": 507}  # of what is not the body's fault
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def slots_router(host: Host) -> APIRouter:
    router = APIRouter(
        responses={
            409: {"model": Error, "description": "The slot runs a request."},
            507: {"model": Error, "description": "The file cannot be written, as on a full disk."},
        }
    )

    @router.get("/slots")
    async def slots() -> list[JsonObject]:
        """What each slot holds; the text only if the server was started with `--slots-debug`."""
        infos = await _asked(host, lambda engine: engine.slots(host.settings.slots_debug))
        return [_as_json(info, host.engine.context) for info in infos]

    @router.post("/slots/{slot}")
    async def act(slot: SlotNumber, action: Action = "", body: SlotBody | None = None) -> JsonObject:
        """`action` is save or restore, with a file name, or erase."""
        if action not in ACTIONS:
            raise refused("action", f"must be one of {', '.join(ACTIONS)}, got {action!r}")
        if not re.fullmatch("[0-9]{1,9}", slot):
            raise ApiError(404, f"there is no slot {slot!r}", param="id_slot", code="slot_unknown")
        return await ACTIONS[action](host, int(slot), body)

    return router


async def _save(host: Host, slot: int, body: SlotBody | None) -> JsonObject:
    path = _path(host, body)
    saved, milliseconds = await _timed(host, lambda engine: engine.save_slot(slot, path))
    counts = {"n_saved": saved.rows, "n_written": saved.num_bytes}
    return {"id_slot": slot, "filename": path.name, **counts, "timings": {"save_ms": milliseconds}}


async def _restore(host: Host, slot: int, body: SlotBody | None) -> JsonObject:
    path = _path(host, body)
    restored, milliseconds = await _timed(host, lambda engine: engine.restore_slot(slot, path))
    counts = {"n_restored": restored.rows, "n_read": restored.num_bytes}
    return {"id_slot": slot, "filename": path.name, **counts, "timings": {"restore_ms": milliseconds}}


async def _erase(host: Host, slot: int, body: SlotBody | None) -> JsonObject:
    if body is not None and body.filename is not None:
        raise refused("filename", "is not taken by erase", "unsupported_parameter")
    return {"id_slot": slot, "n_erased": await _asked(host, lambda engine: engine.erase_slot(slot))}


ACTIONS: dict[str, Callable[[Host, int, SlotBody | None], Any]] = {
    "save": _save,
    "restore": _restore,
    "erase": _erase,
}


def _path(host: Host, body: SlotBody | None) -> Path:
    """Where a file of that name lies; only plain names are taken."""
    if host.settings.slot_save_path is None:
        raise ApiError(
            400, "this server saves no slots; start it with --slot-save-path FOLDER", code="slot_save_path_missing"
        )
    if body is None or body.filename is None:
        raise refused("filename", "is required", "missing_required_parameter")
    if not SAFE_NAME.fullmatch(body.filename):
        raise refused(
            "filename",
            "must be a plain name: up to 200 letters, digits, '.', '-' and '_', no '.' or '-' at its start",
        )
    return host.settings.slot_save_path / body.filename


async def _timed(host: Host, work: Callable[[Engine], Answer]) -> tuple[Answer, float]:
    """The answer, and how long it took once the engine came to it."""

    def timed(engine: Engine) -> tuple[Answer, float]:
        began = time.perf_counter()
        return work(engine), round((time.perf_counter() - began) * 1e3, 3)

    return await _asked(host, timed)


async def _asked(host: Host, question: Callable[[Engine], Answer]) -> Answer:
    """Ask the engine between two steps. Its steps wait meanwhile."""
    try:
        return await asyncio.wrap_future(host.worker.ask(question))
    except WorkerStopped as error:
        raise stopped(str(error)) from None
    except RequestError as error:
        answer = from_request_error(error)
        answer.status = STATUS.get(error.code or "", answer.status)
        raise answer from None


def _as_json(info: SlotInfo, context: int) -> JsonObject:
    draft = info.draft
    speculative = None
    if draft is not None:
        speculative = {
            "draft": draft.kind,
            "model": draft.model,
            "images": draft.images,
            "depth": draft.depth,
            "off_because": draft.off_because,
            "n_rows": info.draft_rows,
            "draft_n": sum(info.drafted),
            "draft_n_accepted": sum(info.accepted),
            "by_depth": [{"tried": d, "accepted": a} for d, a in zip(info.drafted, info.accepted, strict=True)],
        }
    told = {
        "id": info.id,
        "id_task": info.request_id,
        "state": info.state,
        "is_processing": info.state != "idle",
        "n_ctx": context,
        "n_past": info.rows,
        "n_prompt": info.prompt_rows,
        "n_image": info.image_rows,
        "n_cached": info.cached_rows,
        "n_decoded": info.generated,
        "n_steps": info.steps,
        "speculative": speculative,
    }
    return told if info.text is None else told | {"prompt": info.text}
