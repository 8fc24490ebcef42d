"""Step-3.5 / 3.7-Flash: sliding and full attention with a gate per head, mixture of experts, three chained MTP modules.

Facts and where they come from (transformers 5.24 `models/step3p7`, llama.cpp `step35.cpp`, vLLM `step3p5_mtp.py`):
- RMSNorm weights are stored as w - 1; queries and keys are normed per head;
- a sliding layer may have another number of query heads than a full one, and each kind has a theta, a rotary share and
  perhaps a scaling of its own; a sliding row sees itself and the window - 1 rows before;
- `g_proj` has one gate per head, which multiplies what the head read;
- the router scores by sigmoid, its bias counts for the choice only; experts of some layers clamp their gated product;
- one axis: an image row is numbered like a token;
- MTP layers follow the trunk. Module i at row t is fed (state of module i - 1 at row t, input of row t + 1 + i), as
  eh_proj([enorm(embedding), hnorm(state)]). States are taken and chained before a norm (llama.cpp, vLLM; transformers'
  generic MTP takes them after it). Each module has a norm and an output head; those left out are the target's.

Layers that read the same input are fused into one product at load: [query, key, value, gate], [gate, up].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreglance.batch import TILE, Batch
from foreglance.cache.kv import KVSpec
from foreglance.images import Picture
from foreglance.models.attention import attend
from foreglance.models.base import Caches, HeadSpec, ModelError, ModelSpec, State, tiles_of
from foreglance.models.layers import (
    FREQUENCY_FACTORS,
    RotaryTable,
    default_inv_freq,
    divided,
    embed_rows,
    rotary_table,
)
from foreglance.models.loader import CentredLoader
from foreglance.models.moe import Experts, Routing, expert_shapes
from foreglance.models.plans import Plans
from foreglance.models.step_vision import PROJECTORS, TOWERS, StepVision
from foreglance.models.vision import no_tower
from foreglance.models.weights import Weights
from foreglance.ops.base import Ops, PackedLinear
from foreglance.prompt import ImageInput, OneAxis

FAMILY = "step3p7"
HIDDEN_FROM: State = "pre_norm"  # the target's state that module 0 is fed: before the final norm
CHAINED_FROM: State = "pre_norm"  # a module's state that the next one is fed: before its own norm
POSITION_OF = "input"  # a row is numbered as its input; on one axis this is a constant
FULL, SLIDING = "full_attention", "sliding_attention"
TRUNKS = ("model.language_model.", "model.", "language_model.model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
LAYER_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)
ROPE_SCALINGS = ("linear", "llama3", "yarn")  # those whose frequencies do not depend on how long a text is


@dataclass(frozen=True)
class Conventions:
    """What engines disagree about and no checkpoint says; the defaults are what the published head was trained with."""

    hidden_from: State = HIDDEN_FROM
    chained_from: State = CHAINED_FROM


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from `text_config`."""

    hidden: int
    inner: int
    full_heads: int
    sliding_heads: int
    kv_heads: int
    head_size: int
    window: int | None
    scale: float
    num_experts: int
    top_k: int
    expert_inner: int
    shared_inner: int
    router_scale: float
    eps: float

    @classmethod
    def of(cls, text: dict[str, Any]) -> Shape:
        _refuse(text)
        return cls(
            hidden=text["hidden_size"],
            inner=text["intermediate_size"],
            full_heads=text["num_attention_heads"],
            sliding_heads=text.get("num_sliding_attention_heads") or text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_size=text["head_dim"],
            window=text["sliding_window"],
            scale=(text["query_pre_attn_scalar"] or text["head_dim"]) ** -0.5,
            num_experts=text["n_routed_experts"],
            top_k=text["num_experts_per_tok"],
            expert_inner=text["moe_intermediate_size"],
            shared_inner=text["share_expert_dim"],
            router_scale=text["moe_router_scaling_factor"],
            eps=text["rms_norm_eps"],
        )

    def heads(self, kind: str) -> int:
        return self.sliding_heads if kind == SLIDING else self.full_heads

    def cache(self, kind: str) -> KVSpec:
        return KVSpec(self.kv_heads, self.head_size, self.window if kind == SLIDING else None)

    def fused(self, kind: str) -> list[int]:
        """Widths of query, key, value and gate."""
        keys = self.kv_heads * self.head_size
        return [self.heads(kind) * self.head_size, keys, keys, self.heads(kind)]

    def linear_shapes(self, sparse: bool) -> set[tuple[int, int]]:
        """(out, in) of every fused product, for the self-test."""
        shapes = {(2 * self.inner, self.hidden), (self.hidden, self.inner)}
        for kind in (FULL, SLIDING):
            query, *rest = self.fused(kind)
            shapes |= {(query + sum(rest), self.hidden), (self.hidden, query)}
        if sparse:
            shapes |= {(2 * self.shared_inner, self.hidden), (self.hidden, self.shared_inner)}
            shapes |= expert_shapes(self.hidden, self.expert_inner, self.num_experts)
        return shapes

    def row_widths(self, sparse: bool) -> set[int]:
        widths = {self.hidden, self.inner, self.head_size, self.full_heads, self.sliding_heads}
        return widths | ({self.expert_inner, self.shared_inner, self.num_experts} if sparse else set())


def _refuse(text: dict[str, Any]) -> None:
    """What the config class allows and no published checkpoint has."""
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if text.get(name):
            raise ModelError(f"{name} = {text[name]!r} is not supported for this family")
    if text.get("gating", True) not in (True, "per-head"):
        raise ModelError(f"gating = {text['gating']!r} is not supported for this family; only one gate per head is")
    odd = sorted(set(text["layer_types"]) - {FULL, SLIDING})
    if odd:
        raise ModelError(f"layer type {odd[0]!r} is unknown; this family has {FULL} and {SLIDING}")
    if SLIDING in text["layer_types"] and not text["sliding_window"]:
        raise ModelError("the config has sliding layers, but no sliding_window")


@dataclass(frozen=True)
class LayerPlan:
    """What one layer is. Limits clamp the gated products; None does not."""

    kind: str
    sparse: bool
    limit: float | None
    shared_limit: float | None


class Loader(CentredLoader):
    """One that knows several published names of a tensor."""

    def one_of(self, names: Sequence[str], *shape: int) -> Tensor:
        """The tensor under the first of its published names that is there."""
        return self.tensor(next((name for name in names if name in self), names[0]), *shape)


class Attention:
    """Attention over all rows or the last `window` ones, with q/k norm and a gate per head."""

    def __init__(self, load: Loader, shape: Shape, kind: str, layer: int):
        self._ops, self._shape, self._layer, self._kind = load.ops, shape, layer, kind
        self._heads = shape.heads(kind)
        names = dict(zip(("q_proj", "k_proj", "v_proj", "g_proj"), shape.fused(kind), strict=True))
        self._in = load.linear(names, shape.hidden)
        self._out = load.linear({"o_proj": shape.hidden}, self._heads * shape.head_size)
        of_query, of_key = load.norm("q_norm", shape.head_size), load.norm("k_norm", shape.head_size)
        self._norms = torch.stack([of_query] * self._heads + [of_key] * shape.kv_heads)  # [heads + kv heads, d]

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        s, n, heads = self._shape, len(x), self._heads
        both = heads + s.kv_heads
        mixed, gate = self._ops.linear(x, self._in, batch.blocks).split([(both + s.kv_heads) * s.head_size, heads], -1)
        turned, values = mixed.reshape(n, both + s.kv_heads, s.head_size).split([both, s.kv_heads], 1)
        turned = self._ops.rotary(self._ops.rms_norm(turned, self._norms, s.eps), *angles[self._kind])
        seen = attend(self._ops, batch, caches, self._layer, turned[:, :heads], turned[:, heads:], values, s.scale)
        seen = self._ops.sigmoid_mul(seen.view(n, heads, s.head_size), gate.unsqueeze(-1))
        return self._ops.linear(seen.reshape(n, heads * s.head_size), self._out, batch.blocks)


class Mlp:
    """down(silu(gate) * up), clamped in some layers."""

    def __init__(self, load: Loader, hidden: int, inner: int, limit: float | None):
        self._ops, self._limit = load.ops, limit
        self._gate_up = load.linear({"gate_proj": inner, "up_proj": inner}, hidden)
        self._down = load.linear({"down_proj": hidden}, inner)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        inner = self._ops.silu_mul(self._ops.linear(x, self._gate_up, batch.blocks), self._limit)
        return self._ops.linear(inner, self._down, batch.blocks)


class SparseMlp:
    """Routed experts and one that every row passes. `load` is at the layer."""

    def __init__(self, load: Loader, s: Shape, plan: LayerPlan):
        self._ops = load.ops
        split, fused = ("moe.gate_proj.weight", "moe.up_proj.weight"), "mlp.experts.gate_up_proj"
        if split[0] in load:
            sizes = s.num_experts, s.expert_inner, s.hidden
            gate_up = load.packed_each(split, lambda: torch.cat([load.tensor(name, *sizes) for name in split], 1))
        else:
            sizes = s.num_experts, 2 * s.expert_inner, s.hidden
            gate_up = load.packed_each([fused], lambda: load.tensor(fused, *sizes))
        down = "moe.down_proj.weight" if "moe.down_proj.weight" in load else "mlp.experts.down_proj"
        self._experts = Experts(
            load.ops,
            load.one_of(("moe.gate.weight", "mlp.gate.weight"), s.num_experts, s.hidden),
            load.one_of(("moe.router_bias", "mlp.gate.e_score_correction_bias"), s.num_experts),
            gate_up,
            load.packed_each([down], lambda: load.tensor(down, s.num_experts, s.hidden, s.expert_inner)),
            Routing(s.top_k, "sigmoid", s.router_scale, plan.limit),
        )
        shared = "share_expert" if "share_expert.gate_proj.weight" in load else "mlp.shared_experts"
        self._shared = Mlp(load.at(shared), s.hidden, s.shared_inner, plan.shared_limit)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self._ops.add(self._experts(x, batch), self._shared(x, batch))


class Layer:
    """Pre-norm decoder layer. `place` is its cache's among the model's."""

    def __init__(self, load: Loader, shape: Shape, plan: LayerPlan, place: int):
        self._ops, self._eps = load.ops, shape.eps
        self._attention = Attention(load.at("self_attn"), shape, plan.kind, place)
        self._before = load.norm("input_layernorm", shape.hidden)
        self._after = load.norm("post_attention_layernorm", shape.hidden)
        self._mlp: Mlp | SparseMlp
        if plan.sparse:
            self._mlp = SparseMlp(load, shape, plan)
        else:
            self._mlp = Mlp(load.at("mlp"), shape.hidden, shape.inner, plan.shared_limit)

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        seen = self._attention(self._ops.rms_norm(x, self._before, self._eps), batch, caches, angles)
        x = self._ops.add(x, seen)
        return self._ops.add(x, self._mlp(self._ops.rms_norm(x, self._after, self._eps), batch))


@dataclass(frozen=True)
class Output:
    """A final norm and an output head, and on which side of the norm states are handed on."""

    ops: Ops
    norm: Tensor
    weight: PackedLinear
    eps: float
    states: State

    def handed_on(self, x: Tensor) -> Tensor:
        return x if self.states == "pre_norm" else self.ops.rms_norm(x, self.norm, self.eps)

    def logits(self, state: Tensor) -> Tensor:
        normed = self.ops.rms_norm(state, self.norm, self.eps) if self.states == "pre_norm" else state
        return self.ops.linear(normed, self.weight, tiles_of(len(normed), TILE))


class MtpModule:
    """One decoder layer over rows (state of the module before, an input further on), with a cache of its own."""

    def __init__(
        self,
        load: Loader,
        shape: Shape,
        plan: LayerPlan,
        spec: HeadSpec,
        target: Step3p7,
        rotary: RotaryTable,
        output: Output,
    ):
        self.spec = spec
        self._ops, self._eps, self._kind, self._rotary, self._output = load.ops, shape.eps, plan.kind, rotary, output
        self._table = target.table
        if "embed_tokens.weight" in load:
            self._table = load.tensor("embed_tokens.weight", *target.table.shape)
        self._embedding_norm, self._hidden_norm = load.norm("enorm", shape.hidden), load.norm("hnorm", shape.hidden)
        self._fuse = load.linear({"eh_proj": shape.hidden}, 2 * shape.hidden)
        self._layer = Layer(load, shape, plan, 0)
        self.guess_ids: Tensor | None = None
        self.output: PackedLinear | None = None
        self.plans = Plans(load.ops, self._forward)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        ops, eps = self._ops, self._eps
        assert batch.hidden is not None
        embedding = ops.rms_norm(embed_rows(ops, self._table, batch), self._embedding_norm, eps)
        hidden = ops.rms_norm(batch.hidden, self._hidden_norm, eps)
        x = ops.linear(ops.joined(embedding, hidden), self._fuse, batch.blocks)
        x = self._layer(x, batch, caches, {self._kind: self._rotary.angles(self._ops, batch.positions)})
        return self._output.handed_on(x)

    def guess_logits(self, hidden: Tensor) -> Tensor:
        return self._output.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._output.logits(hidden)


@dataclass(frozen=True)
class MtpHead:
    """The modules in order; see `models.base.ChainedHead`."""

    spec: HeadSpec
    modules: tuple[MtpModule, ...]


class Step3p7:
    """A loaded target of this family."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: Shape,
        plans: Sequence[LayerPlan],
        load: Loader,
        rotary: dict[str, RotaryTable],
        head: PackedLinear | None,
        states: State,
    ):
        self.spec = spec
        self.head: MtpHead | MtpModule | None = None
        self.vision: StepVision | None = None
        self.table = load.tensor("embed_tokens.weight", spec.vocab_size, shape.hidden)
        self._ops, self._rotary = load.ops, rotary
        self._layers = [Layer(load.at(f"layers.{i}"), shape, plan, i) for i, plan in enumerate(plans)]
        weight = head if head is not None else load.packed(["embed_tokens.weight"], lambda: self.table)
        self.output = Output(load.ops, load.norm("norm", shape.hidden), weight, shape.eps, states)
        self.plans = Plans(load.ops, self._forward)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        angles = {kind: table.angles(self._ops, batch.positions) for kind, table in self._rotary.items()}
        x = embed_rows(self._ops, self.table, batch)
        for layer in self._layers:
            x = layer(x, batch, caches, angles)
        return self.output.handed_on(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output.logits(hidden)

    def prepare(self, picture: Picture) -> ImageInput:
        if self.vision is None:
            raise no_tower(self.spec.name)
        return self.vision.prepare(picture)

    def embed_image(self, image: ImageInput) -> Tensor:
        assert self.vision is not None
        return self.vision.embed(image)


def read_config(folder: Path) -> Any:
    """transformers' config of a folder. Published per-layer lists have an entry for each trunk layer, or for each MTP
    layer as well; the number of MTP layers stands in either config, or only in the length of the lists."""
    from transformers import Step3p7Config

    values = json.loads((folder / "config.json").read_text())
    text = values["text_config"]
    trunk = text["num_hidden_layers"]
    longest = max([len(text[name]) for name in LAYER_LISTS if isinstance(text.get(name), list)], default=trunk)
    declared = text.get("num_nextn_predict_layers") or values.get("num_nextn_predict_layers") or 0
    text["num_nextn_predict_layers"] = max(declared, longest - trunk)
    for name in LAYER_LISTS:
        if isinstance(text.get(name), list) and trunk < len(text[name]) < trunk + text["num_nextn_predict_layers"]:
            text[name] = text[name][:trunk]
    return Step3p7Config.from_dict(values)


def shapes_of(config: dict[str, Any]) -> tuple[set[tuple[int, int]], set[int], set[tuple[int, int]]]:
    """Weight shapes (out, in), row widths and expert sizes of a model, for the self-test."""
    text = config["text_config"]
    shape, sparse = Shape.of(text), "sparse" in text["mlp_layer_types"]
    shapes = shape.linear_shapes(sparse) | {(text["vocab_size"], shape.hidden), (shape.hidden, 2 * shape.hidden)}
    return shapes, shape.row_widths(sparse), {(shape.hidden, shape.expert_inner)} if sparse else set()


def load(
    name: str,
    folder: Path,
    config: Any,
    ops: Ops,
    context: int,
    eos: frozenset[int],
    text_only: bool = False,
    conventions: Conventions = Conventions(),
) -> Step3p7:
    """Read a checkpoint folder, or with `text_only` its text decoder. `config` is transformers' config of it."""
    values = config.to_dict()
    text = values["text_config"]
    shape, weights = Shape.of(text), Weights(folder)
    trunk = next((prefix for prefix in TRUNKS if f"{prefix}embed_tokens.weight" in weights), None)
    if trunk is None:
        raise ModelError(f"{folder}: no embed_tokens.weight under {' or '.join(TRUNKS)}")
    if text_only:
        weights.leave((*TOWERS, *PROJECTORS, *_behind(weights, f"{trunk}layers.", text["num_hidden_layers"])))
    kinds, limits = text["layer_types"], Limits.read(folder)
    sparse = [kind == "sparse" for kind in text["mlp_layer_types"]]
    plans = [limits.plan(i, kind, sparse[i]) for i, kind in enumerate(kinds)]
    spec = ModelSpec(
        name=name,
        family=FAMILY,
        vocab_size=text["vocab_size"],
        hidden_size=shape.hidden,
        context=context,
        rule=OneAxis(),
        caches=tuple(shape.cache(kind) for kind in kinds),
        whole_images=False,
        image_token=values["image_token_id"],
        eos=eos,
    )
    rotary = {kind: _rotary(config.text_config, kind, shape, context) for kind in set(kinds)}
    loader = Loader(ops, weights, trunk)
    head = _output_head(ops, weights, text, values)
    model = Step3p7(spec, shape, plans, loader, rotary, head, conventions.hidden_from)
    if any(any(weights.names(prefix)) for prefix in TOWERS):
        model.vision = StepVision(folder, config, weights, shape.hidden)
    output = model.output
    if ops.draft is not ops:
        table = f"{trunk}embed_tokens.weight"
        again = _output_head(ops.draft, weights, text, values) or weights.packed(
            ops.draft, [table], lambda: model.table
        )
        output = replace(output, ops=ops.draft, weight=again)
    model.head = _mtp(Loader(ops.draft, weights, trunk), text, shape, limits, model, output, rotary, conventions)
    weights.finish()
    return model


def _behind(weights: Weights, stem: str, count: int) -> set[str]:
    """Prefixes of the layers behind the trunk's: MTP modules."""
    numbers = {name.removeprefix(stem).split(".")[0] for name in weights.names(stem)}
    return {f"{stem}{number}." for number in numbers if int(number) >= count}


@dataclass(frozen=True)
class Limits:
    """Clamping bounds by layer, MTP layers included; 0 or an entry that is not there does not clamp."""

    routed: Sequence[float | None]
    shared: Sequence[float | None]

    @classmethod
    def read(cls, folder: Path) -> Limits:
        """From the file, since the config class keeps the trunk's only."""
        text = json.loads((folder / "config.json").read_text())["text_config"]
        return cls(text.get("swiglu_limits") or (), text.get("swiglu_limits_shared") or ())

    def plan(self, layer: int, kind: str, sparse: bool) -> LayerPlan:
        routed, shared = (values[layer] if layer < len(values) else None for values in (self.routed, self.shared))
        return LayerPlan(kind, sparse, routed or None, shared or None)


def _rotary(text: Any, kind: str, shape: Shape, context: int) -> RotaryTable:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = text.rope_parameters[kind]
    size = int(shape.head_size * rope.get("partial_rotary_factor", 1.0))
    inv_freq, scaling = default_inv_freq(rope["rope_theta"], size), 1.0
    if rope["rope_type"] in ROPE_SCALINGS:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](text, layer_type=kind)
    elif rope["rope_type"] != "default":
        raise ModelError(f"rope_type {rope['rope_type']!r} is not supported; default, {', '.join(ROPE_SCALINGS)} are")
    if kind == FULL:
        inv_freq = divided(inv_freq, text.to_dict().get(FREQUENCY_FACTORS))
    return rotary_table(inv_freq, context, torch.zeros(len(inv_freq), dtype=torch.int64), scaling)


def _output_head(ops: Ops, weights: Weights, text: dict[str, Any], values: dict[str, Any]) -> PackedLinear | None:
    """None if the embedding serves as output head."""
    name = next((name for name in HEADS if name in weights), None)
    if name is None and (values.get("tie_word_embeddings") or text.get("tie_word_embeddings")):
        return None
    name = name or HEADS[0]
    return weights.packed(ops, [name], lambda: weights.take(name, text["vocab_size"], text["hidden_size"]))


def _mtp(
    trunk: Loader,
    text: dict[str, Any],
    shape: Shape,
    limits: Limits,
    target: Step3p7,
    target_output: Output,
    rotary: dict[str, RotaryTable],
    conventions: Conventions,
) -> MtpHead | MtpModule | None:
    """The head if its tensors are there: layers behind the trunk. Tensors decide and not the config, since converted
    checkpoints keep the one and lose the other."""
    modules = []
    first = text["num_hidden_layers"]
    while any(trunk.weights.names(f"{trunk.prefix}layers.{first + len(modules)}.")):
        layer = first + len(modules)
        load = trunk.at(f"layers.{layer}")
        plan = limits.plan(
            layer,
            _mtp_kind(load, text, shape, len(modules)),
            "moe.gate.weight" in load or "mlp.gate.weight" in load,
        )
        if plan.kind not in rotary:
            raise ModelError(f"MTP layer {layer} is of kind {plan.kind}, which the trunk has not")
        spec = _head_spec(target, (shape.cache(plan.kind),), 1, conventions)
        output = _mtp_output(load, target_output, shape, conventions)
        modules.append(MtpModule(load, shape, plan, spec, target, rotary[plan.kind], output))
    if len(modules) < 2:
        return modules[0] if modules else None
    caches = tuple(cache for module in modules for cache in module.spec.caches)
    return MtpHead(_head_spec(target, caches, len(modules), conventions), tuple(modules))


def _mtp_kind(load: Loader, text: dict[str, Any], shape: Shape, module: int) -> str:
    """From the config if its lists go that far. Else the number of query heads tells the kinds apart, and where it does
    not, the published modules are sliding ones."""
    kinds = text.get("mtp_layer_types") or []
    if module < len(kinds):
        return kinds[module]
    if shape.full_heads != shape.sliding_heads and "self_attn.g_proj.weight" in load:
        return FULL if load.weights.shape(f"{load.prefix}self_attn.g_proj.weight")[0] == shape.full_heads else SLIDING
    return SLIDING if SLIDING in text["layer_types"] else FULL


def _head_spec(target: Step3p7, caches: tuple[KVSpec, ...], num_modules: int, conventions: Conventions) -> HeadSpec:
    spec = target.spec
    return HeadSpec(
        family=FAMILY,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        rule=spec.rule,
        caches=caches,
        num_modules=num_modules,
        position_of=POSITION_OF,
        placeholder=spec.image_token if 0 <= spec.image_token < spec.vocab_size else 0,  # some lie beyond the table
    )


def _mtp_output(load: Loader, target: Output, shape: Shape, conventions: Conventions) -> Output:
    """The module's own norm and output head, each under either published name; what is left out is the target's."""
    output = replace(target, states=conventions.chained_from)
    for stem in ("transformer.shared_head", "shared_head"):
        if f"{stem}.norm.weight" in load:
            output = replace(output, norm=load.norm(f"{stem}.norm", shape.hidden))
        if f"{stem}.output.weight" in load:
            vocab = target.weight.shape[0]
            output = replace(output, weight=load.linear({f"{stem}.output": vocab}, shape.hidden))
    return output
