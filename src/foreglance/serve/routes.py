"""The endpoints: OpenAI's, and those for looking at the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from foreglance import __version__
from foreglance.request import MAX_DEPTH
from foreglance.serve.chat import chat_job, chat_names, request_of
from foreglance.serve.completions import completion_job
from foreglance.serve.errors import ApiError
from foreglance.serve.explain import describe
from foreglance.serve.host import Host
from foreglance.serve.openai import Json as JsonObject
from foreglance.serve.openai import check_model
from foreglance.serve.responses import FIELD_NAMES as RESPONSE_NAMES
from foreglance.serve.responses import response_job
from foreglance.serve.schema import POLICIES, ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody
from foreglance.serve.stream import while_connected


def openai_router(host: Host) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [_model(host, name) for name in host.names]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> JsonObject:
        if name not in host.names:
            raise ApiError(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
        return _model(host, name)

    @router.post("/chat/completions")
    async def chat_completions(http: Request, body: ChatBody) -> Response:
        return await host.answer(http, body, chat_job, chat_names(body), ("messages", body.messages))

    @router.post("/completions")
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await host.answer(http, body, completion_job, {"messages": "prompt"})

    @router.post("/responses")
    async def responses(http: Request, body: ResponseBody) -> Response:
        turns = body.input if isinstance(body.input, list) else ()
        return await host.answer(http, body, response_job, RESPONSE_NAMES, ("input", turns))

    return router


def _model(host: Host, name: str) -> JsonObject:
    spec = host.engine.target.spec
    meta = {"family": spec.family, "n_vocab": spec.vocab_size, "n_ctx": host.engine.context, "n_embd": spec.hidden_size}
    return {"id": name, "object": "model", "created": host.started, "owned_by": "foreglance", "meta": meta}


def other_router(host: Host) -> APIRouter:
    router = APIRouter()
    engine = host.engine

    @router.get("/health")
    async def health() -> JsonObject:
        if host.worker.failure is not None:
            raise ApiError(503, host.worker.failure, code="engine_stopped")
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(host.metrics.text(), media_type=host.metrics.content_type)

    @router.get("/props")
    async def props() -> JsonObject:
        return _props(host)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> JsonObject:
        tokens = await host.dispatch.off_loop(lambda: engine.encode(body.content, bool(body.add_special)))
        if not body.with_pieces:
            return {"tokens": tokens}
        return {"tokens": [{"id": token, "piece": engine.piece(token)} for token in tokens]}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> JsonObject:
        size = engine.target.spec.vocab_size
        for i, token in enumerate(body.tokens):
            if token >= size:
                raise ApiError(
                    400,
                    f"tokens[{i}]: {token} is beyond the vocabulary of {size}",
                    param=f"tokens[{i}]",
                    code="bad_token",
                )
        return {"content": await host.dispatch.off_loop(lambda: engine.decode(body.tokens))}

    @router.post("/explain")
    async def explain(http: Request, body: ChatBody) -> JsonObject:
        """The rows of target and draft for a chat completion's prompt, and a picture of them (`svg`)."""
        check_model(body.model, host.names)
        request = request_of(body, await host.surroundings(body.model, ("messages", body.messages)))
        return await while_connected(
            http.receive, host.dispatch.off_loop(lambda: describe(engine, engine.prepare(request)))
        )

    return router


def _props(host: Host) -> JsonObject:
    engine, spec, limits = host.engine, host.engine.target.spec, host.settings
    return {
        "model": host.model,
        "aliases": list(host.names[1:]),
        "family": spec.family,
        "version": __version__,
        "context": engine.context,
        "total_slots": engine.settings.slots,
        "modalities": {"vision": spec.image_token >= 0, "audio": False},
        "speculation": {
            "draft_kinds": ["auto", *(kind for kind in engine.draft_kinds if kind != "none")],
            "auto": engine.best_draft,
            "image_policies": list(POLICIES),
            "max_depth": MAX_DEPTH,
            "warnings": list(engine.warnings),
        },
        "limits": {
            "body_bytes": limits.max_body,
            "images": engine.settings.max_images,
            "image_pixels": engine.settings.max_pixels,
            "prompt_rows": engine.context - 1,
            "choices": limits.choices,
            "queue": limits.queue,
            "remote_images": limits.remote_images,
        },
    }
