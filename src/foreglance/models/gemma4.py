"""Gemma-4 (E2B/E4B, 12B/31B dense, 26B-A4B mixture): sliding and full attention, layers that share caches, images.

Facts and where they come from (transformers 5.24 `models/gemma4`, vLLM `gemma4.py`, mlx-vlm):
- RMSNorm weights are plain; attention is not scaled (1.0); queries, keys and values are normed, values without weight;
- sliding and full layers have head sizes, key/value heads and rotary tables of their own; on full layers only the first
  `partial_rotary_factor` of the frequencies turn, and values may be the keys before norm and rotation;
- the last `num_kv_shared_layers` have no keys and values: they read the cache of the last layer of their kind before
  them. Nothing behind them needs their state of a prompt row that is not scored, so they skip those rows;
- the embedding is scaled by sqrt(hidden), image embeddings are not; per-layer inputs see a padding token at image rows;
- image rows see each other on sliding layers only, and only if `use_bidirectional_attention` is "vision";
- audio towers of published checkpoints are left aside.

Layers that read the same input are fused into one product at load: [query, key, value], [gate, up].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foreglance.batch import TILE, Batch
from foreglance.cache.kv import KVSpec
from foreglance.images import Picture
from foreglance.models.attention import attend, look
from foreglance.models.base import Caches, ModelError, ModelSpec, tiles_of
from foreglance.models.gemma4_vision import GemmaVision
from foreglance.models.layers import RotaryTable, default_inv_freq, rotary_table
from foreglance.models.loader import Loader
from foreglance.models.moe import Experts, Routing, expert_shapes
from foreglance.models.plans import Plans
from foreglance.models.vision import no_tower
from foreglance.models.weights import Weights
from foreglance.ops.base import Blocks, Ops
from foreglance.prompt import ImageInput, OneAxis

FAMILY = "gemma4"
FULL, SLIDING = "full_attention", "sliding_attention"
SCALE = 1.0  # of attention: norms take its place
NO_IMAGE = -1
TRUNKS = ("model.language_model.", "model.", "language_model.model.")
UNUSED = ("audio_tower.", "embed_audio.")
BEFORE_EXPERTS, EXPERT_SCALE = "pre_feedforward_layernorm_2", "router.per_expert_scale"
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
NEVER_COMPUTED = float("nan")  # states of rows that nobody may read


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer. `cache` is the place of the cache that it reads; `shares`: another layer writes that one;
    `tied`: values are the keys before norm and rotation."""

    kind: str
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    window: int | None
    cache: int
    shares: bool
    tied: bool

    @property
    def turned(self) -> int:
        """Heads of the fused product that are turned: queries and own keys."""
        return self.heads + (0 if self.shares else self.kv_heads)

    @property
    def fused(self) -> int:
        """Rows of the fused product."""
        values = 0 if self.shares or self.tied else self.kv_heads
        return (self.turned + values) * self.head_size


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts that stands beside each MLP."""

    experts: int
    top_k: int
    inner: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, from `text_config`. `per_layer`: width of per-layer inputs, 0 without."""

    hidden: int
    eps: float
    layers: tuple[LayerShape, ...]
    per_layer: int
    mixture: Mixture | None

    @classmethod
    def of(cls, text: dict[str, Any], lent: Mapping[str, int] | None = None) -> Shape:
        """`lent`: places by kind of another model's caches, for a model whose layers all read those."""
        _refuse(text)
        mixture = None
        if text.get("enable_moe_block"):
            mixture = Mixture(text["num_experts"], text["top_k_experts"], text["moe_intermediate_size"])
        return cls(
            hidden=text["hidden_size"],
            eps=text["rms_norm_eps"],
            layers=tuple(_layer_shapes(text, lent)),
            per_layer=text.get("hidden_size_per_layer_input") or 0,
            mixture=mixture,
        )

    @property
    def lends(self) -> dict[str, int]:
        """By kind, the cache that others read: that of the last layer which writes its own."""
        return {layer.kind: layer.cache for layer in self.layers if not layer.shares}

    @property
    def caches(self) -> tuple[KVSpec, ...]:
        return tuple(KVSpec(s.kv_heads, s.head_size, s.window) for s in self.layers if not s.shares)

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(out, in) of every fused product, for the self-test."""
        shapes = set()
        for s in self.layers:
            shapes |= {(s.fused, self.hidden), (self.hidden, s.heads * s.head_size)}
            shapes |= {(2 * s.inner, self.hidden), (self.hidden, s.inner)}
        if self.per_layer:
            shapes |= {(self.per_layer, self.hidden), (self.hidden, self.per_layer)}
            shapes.add((len(self.layers) * self.per_layer, self.hidden))
        if self.mixture is not None:
            shapes |= expert_shapes(self.hidden, self.mixture.inner, self.mixture.experts)
        return shapes

    def row_widths(self) -> set[int]:
        widths = {self.hidden, *(s.head_size for s in self.layers), *(s.inner for s in self.layers)}
        widths |= {self.per_layer} if self.per_layer else set()
        return widths | ({self.mixture.inner, self.mixture.experts} if self.mixture is not None else set())


def _layer_shapes(text: dict[str, Any], lent: Mapping[str, int] | None) -> list[LayerShape]:
    kinds, own = text["layer_types"], {int(i): v for i, v in (text.get("per_layer_config") or {}).items()}
    first_shared = 0 if lent is not None else len(kinds) - (text.get("num_kv_shared_layers") or 0)
    places = dict(lent or {})
    shapes = []
    for i, kind in enumerate(kinds):
        sizes, shares = text | own.get(i, {}), i >= first_shared
        if not shares:
            places[kind] = i
        elif kind not in places:
            raise ModelError(f"layer {i} shares the cache of a {kind} layer, but none before it has one")
        shapes.append(
            LayerShape(
                kind=kind,
                heads=sizes["num_attention_heads"],
                kv_heads=sizes["num_key_value_heads"],
                head_size=sizes["head_dim"],
                inner=sizes["intermediate_size"] * (2 if shares and text.get("use_double_wide_mlp") else 1),
                window=text["sliding_window"] if kind == SLIDING else None,
                cache=places[kind],
                shares=shares,
                tied=bool(text.get("attention_k_eq_v")) and kind == FULL,
            )
        )
    return shapes


def _refuse(text: dict[str, Any]) -> None:
    """What a config may say and no published checkpoint does."""
    if text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelError(f"activation {text['hidden_activation']!r} is not supported; Gemma-4 has gelu_pytorch_tanh")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("use_bidirectional_attention may be 'vision' or nothing in a model that generates text")
    for name in ("attention_bias", "attn_logit_softcapping"):
        if text.get(name):
            raise ModelError(f"{name} = {text[name]!r} is not supported for Gemma-4")
    odd = sorted(set(text["layer_types"]) - {FULL, SLIDING})
    if odd:
        raise ModelError(f"layer type {odd[0]!r} is unknown; this family has {FULL} and {SLIDING}")


class View(Protocol):
    """What a layer sees besides its rows: how they lie, their angles by kind of layer, and keys and values."""

    blocks: Blocks
    angles: Mapping[str, tuple[Tensor, Tensor]]

    def attend(self, layer: LayerShape, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write keys and values [rows, kv heads, d], then look."""
        ...

    def look(self, layer: LayerShape, query: Tensor) -> Tensor:
        """query [rows, heads, d] -> [rows, heads * d]."""
        ...


class BatchView:
    """A batch over its sequences' caches. `whole_images`: image rows see each other on sliding layers."""

    def __init__(
        self, ops: Ops, batch: Batch, caches: Caches, rotary: Mapping[str, RotaryTable], whole_images: bool
    ) -> None:
        self.blocks = batch.blocks
        self.angles = {kind: table.angles(ops, batch.positions) for kind, table in rotary.items()}
        self._ops, self._batch, self._caches, self._whole_images = ops, batch, caches, whole_images

    def attend(self, layer: LayerShape, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        whole = self._whole_images and layer.kind == SLIDING
        return attend(self._ops, self._batch, self._caches, layer.cache, query, keys, values, SCALE, whole)

    def look(self, layer: LayerShape, query: Tensor) -> Tensor:
        whole = self._whole_images and layer.kind == SLIDING
        return look(self._ops, self._batch, self._caches, layer.cache, query, SCALE, whole)


class Attention:
    """Attention with normed queries, keys and values; `shares`: queries only."""

    def __init__(self, load: Loader, shape: Shape, layer: LayerShape):
        s = layer
        self._ops, self._layer, self._eps = load.ops, s, shape.eps
        q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        names, norms = {"q_proj": q}, [load.norm("q_norm", s.head_size)] * s.heads
        if not s.shares:
            names |= {"k_proj": kv} if s.tied else {"k_proj": kv, "v_proj": kv}
            norms += [load.norm("k_norm", s.head_size)] * s.kv_heads + [torch.ones(s.head_size)] * s.kv_heads
        self._in = load.linear(names, shape.hidden)
        self._out = load.linear({"o_proj": shape.hidden}, q)
        self._norms = torch.stack(norms)  # [heads, own key heads, own value heads; head size]

    def __call__(self, x: Tensor, view: View) -> Tensor:
        s = self._layer
        mixed = self._ops.linear(x, self._in, view.blocks).view(len(x), -1, s.head_size)
        if s.tied and not s.shares:
            flat = mixed.view(len(x), -1)
            mixed = self._ops.joined(flat, flat[:, s.heads * s.head_size :]).view(len(x), -1, s.head_size)
        normed = self._ops.rms_norm(mixed, self._norms, self._eps)
        turned = self._ops.rotary(normed[:, : s.turned], *view.angles[s.kind])
        if s.shares:
            seen = view.look(s, turned)
        else:
            seen = view.attend(s, turned[:, : s.heads], turned[:, s.heads :], normed[:, s.turned :])
        return self._ops.linear(seen, self._out, view.blocks)


class Mlp:
    """down(gelu(gate) * up)."""

    def __init__(self, load: Loader, hidden: int, inner: int):
        self._ops = load.ops
        self._gate_up = load.linear({"gate_proj": inner, "up_proj": inner}, hidden)
        self._down = load.linear({"down_proj": hidden}, inner)

    def __call__(self, x: Tensor, blocks: Blocks) -> Tensor:
        inner = self._ops.gelu_mul(self._ops.linear(x, self._gate_up, blocks))
        return self._ops.linear(inner, self._down, blocks)


class PerLayerInput:
    """Adds a gated input of the layer's own, [n, width], to its rows."""

    def __init__(self, load: Loader, shape: Shape):
        self._ops, self._eps = load.ops, shape.eps
        self._gate = load.linear({"per_layer_input_gate": shape.per_layer}, shape.hidden)
        self._projection = load.linear({"per_layer_projection": shape.hidden}, shape.per_layer)
        self._norm = load.norm("post_per_layer_input_norm", shape.hidden)

    def __call__(self, x: Tensor, own: Tensor, blocks: Blocks) -> Tensor:
        gated = self._ops.gelu_mul(self._ops.joined(self._ops.linear(x, self._gate, blocks), own))
        projected = self._ops.linear(gated, self._projection, blocks)
        return self._ops.add(x, self._ops.rms_norm(projected, self._norm, self._eps))


class MixedMlp:
    """An MLP and a mixture of experts side by side, each with norms of its own.

    Router and experts read the same rows under different norm weights. Those are folded into the products, and so is
    the scale of each expert, so that both read rows that are normed without weight.
    """

    def __init__(self, load: Loader, shape: Shape, inner: int, mixture: Mixture):
        h, m = shape.hidden, mixture
        self._ops, self._eps = load.ops, shape.eps
        self._mlp = Mlp(load.at("mlp"), h, inner)
        self._before_mlp = load.norm("pre_feedforward_layernorm", h)
        self._behind_mlp = load.norm("post_feedforward_layernorm_1", h)
        self._behind_experts = load.norm("post_feedforward_layernorm_2", h)
        self._plain = torch.ones(h)
        router = load.tensor("router.proj.weight", m.experts, h).float() * load.tensor("router.scale", h).float()
        before, of_each = load.norm(BEFORE_EXPERTS, h), load.tensor(EXPERT_SCALE, m.experts).float()[:, None, None]
        gate_up = load.packed_each(
            (GATE_UP, f"{BEFORE_EXPERTS}.weight"),
            lambda: load.tensor(GATE_UP, m.experts, 2 * m.inner, h).float() * before,
        )
        down = load.packed_each(
            (DOWN, EXPERT_SCALE), lambda: load.tensor(DOWN, m.experts, h, m.inner).float() * of_each
        )
        routing = Routing(m.top_k, "softmax", gate="gelu")
        self._experts = Experts(load.ops, router * h**-0.5, None, gate_up, down, routing)

    def __call__(self, x: Tensor, view: View) -> Tensor:
        ops, eps = self._ops, self._eps
        dense = self._mlp(ops.rms_norm(x, self._before_mlp, eps), view.blocks)
        mixed = self._experts(ops.rms_norm(x, self._plain, eps), view)
        return ops.add(ops.rms_norm(dense, self._behind_mlp, eps), ops.rms_norm(mixed, self._behind_experts, eps))


class PlainMlp:
    """An MLP with its norm."""

    def __init__(self, load: Loader, shape: Shape, inner: int):
        self._ops, self._eps = load.ops, shape.eps
        self._mlp = Mlp(load.at("mlp"), shape.hidden, inner)
        self._before = load.norm("pre_feedforward_layernorm", shape.hidden)

    def __call__(self, x: Tensor, view: View) -> Tensor:
        return self._mlp(self._ops.rms_norm(x, self._before, self._eps), view.blocks)


class Layer:
    """Norms before and behind attention and MLP, the layer's own input, and a scalar at the end."""

    def __init__(self, load: Loader, shape: Shape, layer: LayerShape):
        self._ops, self._eps = load.ops, shape.eps
        self._attention = Attention(load.at("self_attn"), shape, layer)
        self._before_attention = load.norm("input_layernorm", shape.hidden)
        self._behind_attention = load.norm("post_attention_layernorm", shape.hidden)
        self._mlp: PlainMlp | MixedMlp = (
            PlainMlp(load, shape, layer.inner)
            if shape.mixture is None
            else MixedMlp(load, shape, layer.inner, shape.mixture)
        )
        self._behind_mlp = load.norm("post_feedforward_layernorm", shape.hidden)
        self._own = PerLayerInput(load, shape) if shape.per_layer else None
        self._scalar = load.tensor("layer_scalar", 1).float().item()

    def __call__(self, x: Tensor, own: Tensor | None, view: View) -> Tensor:
        """x [n, h], own [n, per layer] or None -> [n, h]."""
        ops, eps = self._ops, self._eps
        seen = self._attention(ops.rms_norm(x, self._before_attention, eps), view)
        x = ops.add(x, ops.rms_norm(seen, self._behind_attention, eps))
        x = ops.add(x, ops.rms_norm(self._mlp(x, view), self._behind_mlp, eps))
        if self._own is not None:
            assert own is not None
            x = self._own(x, own, view.blocks)
        return ops.scaled(x, self._scalar)


class PerLayerTable:
    """Inputs of all layers at once: a part that only the token decides and one projected from the embedding."""

    def __init__(self, load: Loader, shape: Shape, vocab_size: int):
        self._ops, self._eps, self._size, self._num = load.ops, shape.eps, shape.per_layer, len(shape.layers)
        width = self._num * self._size
        self._table = load.tensor("embed_tokens_per_layer.weight", vocab_size, width)
        self._projection = load.linear({"per_layer_model_projection": width}, shape.hidden)
        self._projection_scale = shape.hidden**-0.5
        self._norm = load.norm("per_layer_projection_norm", self._size)

    def __call__(self, token_ids: Tensor, x: Tensor, blocks: Blocks) -> Tensor:
        """token_ids [n], x [n, h] -> [n, layers, width]."""
        ops = self._ops
        of_token = ops.scaled(ops.embedding(self._table, token_ids), self._size**0.5)
        projected = ops.scaled(ops.linear(x, self._projection, blocks), self._projection_scale)
        projected = ops.rms_norm(projected.view(-1, self._num, self._size), self._norm, self._eps)
        both = ops.add(projected.view(len(x), -1), of_token)
        return ops.scaled(both, 2**-0.5).view(-1, self._num, self._size)


class Gemma4:
    """A loaded target of this family. `lends`: by kind of layer, the cache that an assistant reads."""

    head = None

    def __init__(
        self,
        spec: ModelSpec,
        shape: Shape,
        load: Loader,
        rotary: dict[str, RotaryTable],
        placeholders: tuple[int, ...],
        padding: int,
        softcap: float | None,
    ):
        self.spec, self.shape, self.ops, self.rotary = spec, shape, load.ops, rotary
        self.vision: GemmaVision | None = None
        self.table = load.tensor("embed_tokens.weight", spec.vocab_size, shape.hidden)
        self.output = load.packed(["embed_tokens.weight"], lambda: self.table)
        self._padding, self._softcap = padding, softcap
        self._per_layer = PerLayerTable(load, shape, spec.vocab_size) if shape.per_layer else None
        layers = [Layer(load.at(f"layers.{i}"), shape, layer) for i, layer in enumerate(shape.layers)]
        self._writers, self._readers = layers[: len(spec.caches)], layers[len(spec.caches) :]
        self._norm = load.norm("norm", shape.hidden)
        self.plans = Plans(load.ops, self._forward, dict.fromkeys(placeholders, padding))

    @property
    def lends(self) -> dict[str, int]:
        return self.shape.lends

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] -> [n, h]."""
        return self.ops.scaled(self.ops.embedding(self.table, token_ids), self.shape.hidden**0.5)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """States of chunk rows that are not scored are not computed if layers share caches: they are not a number.
        Placeholder tokens count as padding."""
        placeholders = self.plans.read_as
        if not placeholders.keys().isdisjoint(batch.token_ids.tolist()):
            is_one = torch.isin(batch.token_ids, torch.tensor(sorted(placeholders)))
            batch = replace(batch, token_ids=torch.where(is_one, self._padding, batch.token_ids))
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        x, own = self._inputs(batch)
        x = self._run(self._writers, x, own, batch, caches)
        if batch.num_few == batch.num_rows:
            x = self._run(self._readers, x, own, batch, caches, len(self._writers))
        if not self._readers or batch.num_few == batch.num_rows:
            return self.ops.rms_norm(x, self._norm, self.shape.eps)
        wanted, at = batch.wanted()
        out = torch.full_like(x, NEVER_COMPUTED)
        if len(at):
            own = None if own is None else own[at]
            y = self._run(self._readers, x[at], own, wanted, caches, len(self._writers))
            out[at] = self.ops.rms_norm(y, self._norm, self.shape.eps)
        return out

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Embeddings [n, h] and per-layer inputs [n, layers, width]. Image rows count as padding where only a token is
        asked for."""
        token_ids = batch.token_ids
        x = self.embed(token_ids)
        if batch.image_rows is not None:
            assert batch.embeds is not None
            token_ids = token_ids.index_fill(0, batch.image_rows, self._padding)
            x = x.index_copy(0, batch.image_rows, batch.embeds)
        return x, None if self._per_layer is None else self._per_layer(token_ids, x, batch.blocks)

    def _run(
        self, layers: list[Layer], x: Tensor, own: Tensor | None, batch: Batch, caches: Caches, first: int = 0
    ) -> Tensor:
        view = BatchView(self.ops, batch, caches, self.rotary, self.spec.whole_images)
        for i, layer in enumerate(layers, first):
            x = layer(x, None if own is None else own[:, i], view)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.ops.linear(hidden, self.output, tiles_of(len(hidden), TILE))
        return logits if self._softcap is None else self.ops.softcap(logits, self._softcap)

    def prepare(self, picture: Picture) -> ImageInput:
        if self.vision is None:
            raise no_tower(self.spec.name)
        return self.vision.prepare(picture)

    def embed_image(self, image: ImageInput) -> Tensor:
        assert self.vision is not None
        return self.vision.embed(image)


def shapes_of(config: dict[str, Any]) -> tuple[set[tuple[int, int]], set[int], set[tuple[int, int]]]:
    """Weight shapes (out, in), row widths and experts (hidden, inner) of a model, for the self-test."""
    text = config.get("text_config", config)
    shape = Shape.of(text)
    experts = set() if shape.mixture is None else {(shape.hidden, shape.mixture.inner)}
    return shape.linear_shapes() | {(text["vocab_size"], shape.hidden)}, shape.row_widths(), experts


def load(
    name: str, folder: Path, config: Any, ops: Ops, context: int, eos: frozenset[int], text_only: bool = False
) -> Gemma4:
    """Read a checkpoint folder, or with `text_only` its text decoder. `config` is transformers' config of it."""
    values = config.to_dict()
    text = values.get("text_config", values)
    shape = Shape.of(text)
    weights = Weights(folder)
    trunk = next((prefix for prefix in TRUNKS if f"{prefix}embed_tokens.weight" in weights), None)
    if trunk is None:
        raise ModelError(f"{folder}: no embed_tokens.weight under {', '.join(TRUNKS)}")
    _check_vocabularies(text, shape)
    rotary = {kind: rotary_of(text, shape, kind, context) for kind in text["layer_types"]}
    spec = ModelSpec(
        name=name,
        family=FAMILY,
        vocab_size=text["vocab_size"],
        hidden_size=shape.hidden,
        context=context,
        rule=OneAxis(),
        caches=shape.caches,
        whole_images=text.get("use_bidirectional_attention") == "vision",
        image_token=NO_IMAGE if values.get("image_token_id") is None else values["image_token_id"],
        eos=eos,
    )
    names = ("image_token_id", "video_token_id", "audio_token_id")
    placeholders = tuple(values[n] for n in names if values.get(n) is not None)
    padding, softcap = text.get("pad_token_id") or 0, text.get("final_logit_softcapping")
    model = Gemma4(spec, shape, Loader(ops, weights, trunk), rotary, placeholders, padding, softcap)
    if not values.get("tie_word_embeddings", text.get("tie_word_embeddings", True)):
        head = "lm_head.weight"
        model.output = weights.packed(ops, [head], lambda: weights.take(head, spec.vocab_size, shape.hidden))
    top = trunk.removesuffix("language_model.")
    if text_only:
        weights.leave([f"{top}{part}" for part in ("vision_tower.", "embed_vision.")])
    if values.get("vision_config") and any(weights.names(f"{top}vision_tower.")):
        model.vision = GemmaVision(folder, config, weights, top)
    weights.finish(may_stay=lambda tensor: _is_unused(tensor, trunk, shape))
    return model


def _check_vocabularies(text: dict[str, Any], shape: Shape) -> None:
    per_layer = text.get("vocab_size_per_layer_input")
    if shape.per_layer and per_layer != text["vocab_size"]:
        raise ModelError(f"per-layer inputs for {per_layer} tokens do not fit a vocabulary of {text['vocab_size']}")


def _is_unused(tensor: str, trunk: str, shape: Shape) -> bool:
    """What published checkpoints hold and nothing needs: audio, keys and values of layers that share a cache, the
    output head of tied ones, rotary frequencies."""
    if any(f".{part}" in f".{tensor}" for part in UNUSED) or tensor.endswith("inv_freq") or tensor == "lm_head.weight":
        return True
    shared = [i for i, layer in enumerate(shape.layers) if layer.shares]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return any(tensor == f"{trunk}layers.{i}.self_attn.{name}.weight" for i in shared for name in names)


def rotary_of(text: dict[str, Any], shape: Shape, kind: str, context: int) -> RotaryTable:
    """Angles of whole heads; on `proportional` layers the frequencies behind the first part stand still."""
    rope = text["rope_parameters"][kind]
    size = next(layer.head_size for layer in shape.layers if layer.kind == kind)
    how = rope.get("rope_type", "default")
    if how not in ("default", "proportional"):
        raise ModelError(f"rope_type {how!r} of {kind} is not supported for Gemma-4; default and proportional are")
    inv_freq = default_inv_freq(rope["rope_theta"], size)
    if how == "proportional":
        turning = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        inv_freq = torch.cat([inv_freq[:turning], torch.zeros(size // 2 - turning)]) / rope.get("factor", 1.0)
    return rotary_table(inv_freq, context, torch.zeros(size // 2, dtype=torch.int64))
