"""One engine in a process of its own: reads jobs as lines of JSON, writes an answer for each.

    python -m foreglance.bench.peer_worker '{"engine": "transformers", "model": ..., "threads": 1, ...}'

Engines are imported here only, so that one that crashes or prints takes nothing else down. Standard output carries
answers alone; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]  # text, image (base64 of a PNG, or None), max_tokens, draft, depth
Answer = dict[str, Any]  # text, token_ids, tokens_per_second, prompt_ms, drafted, accepted
Runner = Callable[[Job], Answer]


def run_foreglance(given: dict[str, Any]) -> Runner:
    import torch

    from foreglance.engine import Engine
    from foreglance.request import SamplingParams, Speculation
    from foreglance.settings import Settings

    torch.set_num_threads(given["threads"])
    settings = Settings(weights=given["weights"], prefix_cache_bytes=0, slots=1, context=given["context"])
    engine = Engine.load(given["model"], settings, draft_model=given["assistant"])

    def run(job: Job) -> Answer:
        sampling = SamplingParams(max_tokens=job["max_tokens"], ignore_eos=True)
        speculation = Speculation(engine.best_draft if job["draft"] == "mtp" else "none", job["depth"])
        (result,) = engine.generate(_request(job, sampling, speculation))
        if result.error is not None:
            raise RuntimeError(result.error)
        times = result.timings
        return {
            "text": result.text,
            "token_ids": list(result.token_ids),
            "tokens_per_second": times.tokens_per_second,
            "prompt_ms": times.ttft_ms,
            "drafted": sum(times.drafted),
            "accepted": sum(times.accepted),
        }

    return run


def run_transformers(given: dict[str, Any]) -> Runner:
    """`generate` on the rows that our own prompt code makes, so that both see the same ids and pixels."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, StoppingCriteriaList

    from foreglance.engine import Engine
    from foreglance.models.weights import find_model
    from foreglance.request import SamplingParams, Speculation
    from foreglance.settings import Settings

    torch.set_num_threads(given["threads"])
    folder = find_model(given["model"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    kind = AutoModelForImageTextToText if config.get("vision_config") else AutoModelForCausalLM
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given["weights"]]
    model = kind.from_pretrained(folder, dtype=dtype).eval()
    engine = Engine.load(given["model"], Settings(weights="fp16", slots=1, prefix_cache_bytes=0, try_drafts=False))
    how = {"plain": {}, "mtp": {"use_mtp": True}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}

    def run(job: Job) -> Answer:
        rows = engine.prepare(_request(job, SamplingParams(), Speculation("none")))
        inputs = _inputs(rows, config["model_type"], dtype)
        seen: list[float] = []

        def watch(input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            seen.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        began = time.perf_counter()
        out = model.generate(
            **inputs,
            **how[job["draft"]],
            do_sample=False,
            max_new_tokens=job["max_tokens"],
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        token_ids = out[0, len(rows) :].tolist()
        return {
            "text": engine.decode(token_ids),
            "token_ids": token_ids,
            "tokens_per_second": (len(token_ids) - 1) / (seen[-1] - seen[0]),
            "prompt_ms": (seen[0] - began) * 1e3,
            "drafted": 0,
            "accepted": 0,
        }

    return run


def _inputs(rows: Any, model_type: str, dtype: Any) -> dict[str, Any]:
    """Arguments of transformers' model for a prompt of at most one image."""
    import torch

    ids = torch.from_numpy(rows.token_ids).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not rows.images:
        return inputs
    patches = rows.images[0].patches
    if model_type == "step3p7":
        whole, crops = patches
        inputs |= {"pixel_values": whole.to(dtype), "num_local_patches": torch.tensor([len(crops)])}
        return inputs | ({"pixel_values_local": crops.to(dtype)} if len(crops) else {})
    kinds = {"mm_token_type_ids": torch.from_numpy(rows.is_image).int().unsqueeze(0)}
    if model_type == "gemma4":
        pixels, places = (part.unsqueeze(0) for part in patches)
        return inputs | kinds | {"pixel_values": pixels.to(dtype), "image_position_ids": places}
    return inputs | kinds | {"pixel_values": patches[0].to(dtype), "image_grid_thw": patches[1]}


def run_llama_cpp(given: dict[str, Any]) -> Runner:
    """llama.cpp's own server in this process, through the `xllamacpp` wheel. Its draft length is fixed at start."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given["gguf"]
    params.n_ctx, params.n_parallel = given["context"], 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
    params.warmup, params.cache_ram_mib = False, 0
    if given["mmproj"]:
        params.mmproj.path = given["mmproj"]
    if given["image_rows"]:
        params.image_min_tokens = params.image_max_tokens = given["image_rows"]
    if given["depth"]:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = given["depth"]
    server = xllamacpp.Server(params)

    def run(job: Job) -> Answer:
        parts: list[dict[str, Any]] = [{"type": "text", "text": job["text"]}]
        if job["image"]:
            parts.insert(0, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{job['image']}"}})
        said = server.handle_chat_completions(
            {
                "messages": [{"role": "user", "content": parts}],
                "max_tokens": job["max_tokens"],
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
                "chat_template_kwargs": {"enable_thinking": False},  # what our prompts leave out
            }
        )
        if "choices" not in said:
            raise RuntimeError(json.dumps(said)[:300])
        times, message = said["timings"], said["choices"][0]["message"]
        return {
            "text": (message.get("reasoning_content") or "") + (message.get("content") or ""),
            "token_ids": None,
            "tokens_per_second": times["predicted_per_second"],
            "prompt_ms": times["prompt_ms"],
            "drafted": times.get("draft_n", 0),
            "accepted": times.get("draft_n_accepted", 0),
        }

    return run


ENGINES: dict[str, Callable[[dict[str, Any]], Runner]] = {
    "foreglance": run_foreglance,
    "transformers": run_transformers,
    "llama.cpp": run_llama_cpp,
}


def _request(job: Job, sampling: Any, speculation: Any) -> Any:
    import PIL.Image

    from foreglance.request import Message, Request

    pictures = [PIL.Image.open(io.BytesIO(base64.b64decode(job["image"])))] if job["image"] else []
    return Request((Message.of("user", job["text"], pictures),), sampling, speculation)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def answer(values: Answer) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        run = ENGINES[given["engine"]](given)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        try:
            answer(run(json.loads(line)))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
