"""Qwen3.5 / 3.6 / 3.8, dense: hybrid gated delta net and gated attention, interleaved M-RoPE, MTP head.

Facts and where they come from (transformers 5.24 `models/qwen3_5`, vLLM `qwen3_5_mtp.py`, llama.cpp #24025):
- RMSNorm weights are stored as w - 1, except the delta net's gated norm;
- `q_proj` holds query and output gate of each head next to each other;
- the MTP head is fed the target's state after the final norm, its fusion is fc([norm(embedding), norm(hidden)]), it
  chains its own state after `mtp.norm`, and uses the target's embedding and output head;
- image rows of one image are causal among each other.

Layers that read the same input are fused into one product at load: [query, gate, key, value], [gate, up],
[qkv, z, b, a].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foreglance.batch import TILE, Batch
from foreglance.cache.kv import KVSpec
from foreglance.cache.recurrent import Recurrent, RecurrentSpec
from foreglance.cache.store import LayerSpec
from foreglance.images import Picture
from foreglance.models.attention import attend
from foreglance.models.base import Caches, HeadSpec, ModelError, ModelSpec, State, tiles_of
from foreglance.models.layers import (
    RotaryTable,
    default_inv_freq,
    embed_rows,
    interleaved_mrope_axes,
    rotary_table,
)
from foreglance.models.loader import CentredLoader, Loader
from foreglance.models.plans import Plans
from foreglance.models.vision import QwenVision, no_tower
from foreglance.models.weights import Weights, take_output
from foreglance.ops.base import DeltaShape, Ops, PackedLinear
from foreglance.prompt import ImageInput, MRope

FAMILY = "qwen3_5"
HIDDEN_FROM: State = "post_norm"  # the target's state that the MTP head is fed: behind the final norm
POSITION_OF = "input"  # an MTP row is numbered as its input x of row t + 1 (transformers, llama.cpp; vLLM: "hidden")
DRAFT_VOCABULARY = 1 << 16  # tokens that a draft head guesses from, where the vocabulary is more than twice as large
L2_EPS = 1e-6
TOWER = "model.visual."
HEADS = ("mtp.", "language_model.mtp.", "model.language_model.mtp.")  # conversions put it under the text model
OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight")
IMAGE_POSITIONS = MRope()


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from `text_config`."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    conv_width: int
    eps: float

    @classmethod
    def of(cls, text: dict[str, Any]) -> Shape:
        return cls(
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_size=text["head_dim"],
            k_heads=text["linear_num_key_heads"],
            v_heads=text["linear_num_value_heads"],
            k_size=text["linear_key_head_dim"],
            v_size=text["linear_value_head_dim"],
            conv_width=text["linear_conv_kernel_dim"],
            eps=text["rms_norm_eps"],
        )

    @property
    def keys(self) -> int:
        return self.k_heads * self.k_size

    @property
    def values(self) -> int:
        return self.v_heads * self.v_size

    @property
    def conv(self) -> int:
        return 2 * self.keys + self.values

    @property
    def attention_cache(self) -> KVSpec:
        return KVSpec(self.kv_heads, self.head_size)

    @property
    def delta_cache(self) -> RecurrentSpec:
        return RecurrentSpec(((self.conv_width - 1, self.conv), (self.v_heads, self.k_size, self.v_size)))

    def linear_shapes(self, layer_types: Sequence[str]) -> set[tuple[int, int]]:
        """(out, in) of every fused product of the mixers, for the self-test."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes = set()
        if "full_attention" in layer_types:
            shapes |= {(2 * q + 2 * kv, self.hidden), (self.hidden, q)}
        if "linear_attention" in layer_types:
            shapes |= {(self.conv + self.values + 2 * self.v_heads, self.hidden), (self.hidden, self.values)}
        return shapes

    def row_widths(self) -> set[int]:
        return {self.hidden, self.head_size, self.v_size, self.k_size, self.v_heads, self.conv}


class Attention:
    """Gated attention with q/k norm; the rotary part is the first half or quarter of each head."""

    def __init__(self, load: Loader, shape: Shape, layer: int):
        self._ops, self._shape, self._layer = load.ops, shape, layer
        self._qkv = load.packed(("q_proj.weight", "k_proj.weight", "v_proj.weight"), lambda: self._fused(load, shape))
        self._out = load.linear({"o_proj": shape.hidden}, shape.heads * shape.head_size)
        norms = [load.norm("q_norm", shape.head_size)] * shape.heads + [
            load.norm("k_norm", shape.head_size)
        ] * shape.kv_heads
        self._norms = torch.stack(norms)  # [heads + kv heads, head size]

    @staticmethod
    def _fused(load: Loader, shape: Shape) -> Tensor:
        """q_proj [heads, (query, gate), d] sorted to all queries, then all gates; keys go next to the queries."""
        heads, size, hidden = shape.heads, shape.head_size, shape.hidden
        both = load.tensor("q_proj.weight", heads * 2 * size, hidden).view(heads, 2, size, hidden)
        keys = load.tensor("k_proj.weight", shape.kv_heads * size, hidden)
        values = load.tensor("v_proj.weight", shape.kv_heads * size, hidden)
        return torch.cat([both[:, 0].reshape(-1, hidden), keys, both[:, 1].reshape(-1, hidden), values])

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: tuple[Tensor, Tensor]) -> Tensor:
        s, n = self._shape, len(x)
        q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        rotated, gate, values = self._ops.linear(x, self._qkv, batch.blocks).split([q + kv, q, kv], -1)
        rotated = self._ops.rms_norm(rotated.view(n, s.heads + s.kv_heads, s.head_size), self._norms, s.eps)
        rotated = self._ops.rotary(rotated, *angles)
        query, keys = rotated[:, : s.heads], rotated[:, s.heads :]
        values = values.view(n, s.kv_heads, s.head_size)
        seen = attend(self._ops, batch, caches, self._layer, query, keys, values, s.head_size**-0.5)
        return self._ops.linear(self._ops.sigmoid_mul(seen, gate), self._out, batch.blocks)


class DeltaNet:
    """Gated delta net: a short convolution, then a matrix state per value head."""

    def __init__(self, load: Loader, shape: Shape, layer: int):
        self._ops, self._shape, self._layer = load.ops, shape, layer
        s = shape
        self._in = load.linear(
            {"in_proj_qkv": s.conv, "in_proj_z": s.values, "in_proj_b": s.v_heads, "in_proj_a": s.v_heads},
            s.hidden,
        )
        self._out = load.linear({"out_proj": s.hidden}, s.values)
        self._how = DeltaShape(s.k_heads, s.v_heads, s.k_size, s.v_size, L2_EPS)
        self._conv = load.tensor("conv1d.weight", s.conv, 1, s.conv_width).float().squeeze(1).contiguous()
        self._neg_rate = -load.tensor("A_log", s.v_heads).float().exp()
        self._dt_bias = load.tensor("dt_bias", s.v_heads).float()
        self._norm = load.tensor("norm.weight", s.v_size).float()  # not zero-centred

    def __call__(self, x: Tensor, batch: Batch, caches: Caches) -> Tensor:
        s, n = self._shape, len(x)
        mixed, z, b, a = self._ops.linear(x, self._in, batch.blocks).split([s.conv, s.values, s.v_heads, s.v_heads], -1)
        log_decay, beta = self._ops.delta_gates(a, b, self._neg_rate, self._dt_bias)
        few, pieces = batch.num_few, []
        if few:
            inputs = mixed[:few], log_decay[:few], beta[:few], self._conv, self._how
            pieces.append(self._ops.delta_few(batch.few(caches), self._layer, *inputs))
        for index, part in enumerate(batch.parts):
            if part.chunk:
                rows, cache = batch.rows_of(index), caches[part.sequence].layers[self._layer]
                assert isinstance(cache, Recurrent)
                pieces.append(self._chunk(cache, mixed[rows], log_decay[rows], beta[rows]))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        out = self._ops.gated_rms_norm(out, z.unflatten(-1, (s.v_heads, s.v_size)), self._norm, s.eps)
        return self._ops.linear(out.view(n, s.values), self._out, batch.blocks)

    def _chunk(self, cache: Recurrent, mixed: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """A prompt chunk through convolution and state: [n, conv] -> [n, value heads, value size]."""
        tail, state = cache.read()
        mixed, window = self._ops.causal_conv(mixed, tail, self._conv)
        out, state = self._ops.delta_chunk(*self._how.split(mixed, self._ops), log_decay, beta, state)
        cache.write(len(mixed), (window[len(mixed) :], state))
        return out


class Mlp(Protocol):
    """What follows the mixer: x [rows, h] -> [rows, h]."""

    def __call__(self, x: Tensor, batch: Batch) -> Tensor: ...


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, load: Loader, hidden: int, inner: int):
        self._ops = load.ops
        self._gate_up = load.linear({"gate_proj": inner, "up_proj": inner}, hidden)
        self._down = load.linear({"down_proj": hidden}, inner)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        inner = self._ops.silu_mul(self._ops.linear(x, self._gate_up, batch.blocks))
        return self._ops.linear(inner, self._down, batch.blocks)


@dataclass(frozen=True)
class Variant:
    """What tells the dense family from its mixture-of-experts sister: name and feed-forward part.

    mlp         (tensors under `mlp.`, text config) -> the layer's feed-forward part
    mlp_shapes  text config -> (out, in) of its products, and widths of its rows
    """

    family: str
    mlp: Callable[[Loader, dict[str, Any]], Mlp]
    mlp_shapes: Callable[[dict[str, Any]], tuple[set[tuple[int, int]], set[int]]]


def _dense_mlp(load: Loader, text: dict[str, Any]) -> Mlp:
    return GatedMlp(load, text["hidden_size"], text["intermediate_size"])


def _dense_shapes(text: dict[str, Any]) -> tuple[set[tuple[int, int]], set[int]]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return {(2 * inner, hidden), (hidden, inner)}, {inner}


DENSE = Variant(FAMILY, _dense_mlp, _dense_shapes)


class Layer:
    """Pre-norm decoder layer around either mixer."""

    def __init__(self, load: Loader, shape: Shape, kind: str, layer: int, mlp: Mlp):
        self._ops, self._eps = load.ops, shape.eps
        self._attention = Attention(load.at("self_attn"), shape, layer) if kind == "full_attention" else None
        self._delta = DeltaNet(load.at("linear_attn"), shape, layer) if kind == "linear_attention" else None
        self._before = load.norm("input_layernorm", shape.hidden)
        self._after = load.norm("post_attention_layernorm", shape.hidden)
        self._mlp = mlp

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: tuple[Tensor, Tensor]) -> Tensor:
        normed = self._ops.rms_norm(x, self._before, self._eps)
        if self._attention is not None:
            x = self._ops.add(x, self._attention(normed, batch, caches, angles))
        elif self._delta is not None:
            x = self._ops.add(x, self._delta(normed, batch, caches))
        return self._ops.add(x, self._mlp(self._ops.rms_norm(x, self._after, self._eps), batch))


class MtpHead:
    """`mtp.*`: one full-attention layer over rows (target state of row t, input of row t + 1)."""

    def __init__(
        self,
        load: Loader,
        shape: Shape,
        spec: HeadSpec,
        mlp: Mlp,
        table: Tensor,
        head: PackedLinear,
        guess_ids: Tensor | None,
        output: PackedLinear | None,
        rotary: RotaryTable,
    ):
        """`head` is the output of `guess_ids`, `output` that of all tokens."""
        self.spec, self.guess_ids, self.output = spec, guess_ids, output
        self._ops, self._shape, self._table, self._head, self._rotary = load.ops, shape, table, head, rotary
        self._embedding_norm = load.norm("pre_fc_norm_embedding", shape.hidden)
        self._hidden_norm = load.norm("pre_fc_norm_hidden", shape.hidden)
        self._fuse = load.linear({"fc": shape.hidden}, 2 * shape.hidden)
        self._layer = Layer(load.at("layers.0"), shape, "full_attention", 0, mlp)
        self._norm = load.norm("norm", shape.hidden)
        self.plans = Plans(load.ops, self._forward)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        ops, eps = self._ops, self._shape.eps
        assert batch.hidden is not None
        embedding = ops.rms_norm(embed_rows(ops, self._table, batch), self._embedding_norm, eps)
        hidden = ops.rms_norm(batch.hidden, self._hidden_norm, eps)
        x = ops.linear(ops.joined(embedding, hidden), self._fuse, batch.blocks)
        x = self._layer(x, batch, caches, self._rotary.angles(self._ops, batch.positions))
        return ops.rms_norm(x, self._norm, eps)

    def guess_logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._head, tiles_of(len(hidden), TILE))

    def logits(self, hidden: Tensor) -> Tensor:
        """Minus infinity for tokens that are not guessed."""
        scores = self.guess_logits(hidden)
        if self.guess_ids is None:
            return scores
        return scores.new_full((len(scores), self.spec.vocab_size), float("-inf")).index_copy(1, self.guess_ids, scores)


class Qwen3_5:
    """A loaded target of this family."""

    def __init__(
        self,
        spec: ModelSpec,
        variant: Variant,
        text: dict[str, Any],
        load: Loader,
        rotary: RotaryTable,
        states: State = HIDDEN_FROM,
    ):
        shape = Shape.of(text)
        self.spec = spec
        self.head: MtpHead | None = None
        self.vision: QwenVision | None = None
        self.table = load.tensor("embed_tokens.weight", spec.vocab_size, shape.hidden)
        self.rotary = rotary
        self.output: PackedLinear | None = None
        self._ops, self._shape, self._states = load.ops, shape, states
        self._layers = [
            Layer(load.at(f"layers.{i}"), shape, kind, i, variant.mlp(load.at(f"layers.{i}.mlp"), text))
            for i, kind in enumerate(text["layer_types"])
        ]
        self._norm = load.norm("norm", shape.hidden)
        self.plans = Plans(load.ops, self._forward)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        angles = self.rotary.angles(self._ops, batch.positions)
        x = embed_rows(self._ops, self.table, batch)
        for layer in self._layers:
            x = layer(x, batch, caches, angles)
        return x if self._states == "pre_norm" else self._ops.rms_norm(x, self._norm, self._shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        if self._states == "pre_norm":
            hidden = self._ops.rms_norm(hidden, self._norm, self._shape.eps)
        return self._ops.linear(hidden, self.output, tiles_of(len(hidden), TILE))

    def prepare(self, picture: Picture) -> ImageInput:
        if self.vision is None:
            raise no_tower(self.spec.name)
        return self.vision.prepare(picture)

    def embed_image(self, image: ImageInput) -> Tensor:
        assert self.vision is not None
        return self.vision.embed(image)


def shapes_of(config: dict[str, Any], variant: Variant = DENSE) -> tuple[set[tuple[int, int]], set[int]]:
    """Weight shapes (out, in) and row widths of a model, for the self-test."""
    text = config.get("text_config", config)
    shape = Shape.of(text)
    mlp_shapes, mlp_widths = variant.mlp_shapes(text)
    shapes = shape.linear_shapes(text["layer_types"]) | {(text["vocab_size"], shape.hidden)}
    shapes |= shape.linear_shapes(["full_attention"]) | {(shape.hidden, 2 * shape.hidden)}  # a draft head's
    return shapes | mlp_shapes, shape.row_widths() | mlp_widths


def load(
    name: str,
    folder: Path,
    config: Any,
    ops: Ops,
    context: int,
    eos: frozenset[int],
    text_only: bool = False,
    variant: Variant = DENSE,
    hidden_from: State = HIDDEN_FROM,
) -> Qwen3_5:
    """Read a checkpoint folder, or with `text_only` its text decoder. `config` is transformers' config of it."""
    values = config.to_dict()
    text = values.get("text_config", values)
    shape = Shape.of(text)
    weights = Weights(folder)
    if text_only:
        weights.leave((TOWER, *HEADS))
    trunk = _trunk_prefix(weights, folder)
    spec = ModelSpec(
        name=name,
        family=variant.family,
        vocab_size=text["vocab_size"],
        hidden_size=shape.hidden,
        context=context,
        rule=IMAGE_POSITIONS,
        caches=tuple(_cache(shape, kind) for kind in text["layer_types"]),
        whole_images=False,
        image_token=values.get("image_token_id", -1),
        eos=eos,
    )
    model = Qwen3_5(spec, variant, text, CentredLoader(ops, weights, trunk), _rotary(text, context), hidden_from)
    tied = bool(values.get("tie_word_embeddings", text.get("tie_word_embeddings")))
    name_of_output = next((output for output in OUTPUTS if output in weights), OUTPUTS[0])
    output = cache(lambda: take_output(weights, model.table, tied, name_of_output))
    of_output = name_of_output if name_of_output in weights else f"{trunk}embed_tokens.weight"
    model.output = weights.packed(ops, [of_output], output)
    if values.get("vision_config") and any(weights.names(TOWER)):
        model.vision = QwenVision(folder, config.vision_config, weights, TOWER)
    ids, of_drafts = draft_ids(spec.vocab_size, eos), model.output
    if ids is not None or ops.draft is not ops:
        rows = [] if ids is None else [f"rows {sha256(ids.numpy()).hexdigest()}"]
        of_drafts = weights.packed(ops.draft, [of_output, *rows], lambda: output() if ids is None else output()[ids])
    model.head = _mtp(ops.draft, weights, text, variant, spec, model, of_drafts, ids)
    weights.finish()
    return model


def draft_ids(vocab_size: int, eos: frozenset[int]) -> Tensor | None:
    """int64 [m], ascending: the tokens that a draft head guesses from, None for all. Of a large vocabulary the first
    ones: a byte-pair vocabulary is numbered by how early, so how often, its pairs were merged (after Zhao and others,
    "FR-Spec", 2025). Tokens that end a text are among them. No text depends on it, only how many guesses stand."""
    if vocab_size <= 2 * DRAFT_VOCABULARY:
        return None
    return torch.tensor(sorted({*range(DRAFT_VOCABULARY), *(token for token in eos if token < vocab_size)}))


def _trunk_prefix(weights: Weights, folder: Path) -> str:
    for prefix in ("model.language_model.", "model.", "language_model.model."):
        if f"{prefix}embed_tokens.weight" in weights:
            return prefix
    raise ModelError(f"{folder}: no embed_tokens.weight under model.language_model, model or language_model.model")


def _cache(shape: Shape, kind: str) -> LayerSpec:
    if kind == "full_attention":
        return shape.attention_cache
    if kind == "linear_attention":
        return shape.delta_cache
    raise ModelError(f"layer type {kind!r} is unknown; this family has full_attention and linear_attention")


def _rotary(text: dict[str, Any], context: int) -> RotaryTable:
    rope = text["rope_parameters"]
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"rope_type {rope['rope_type']!r} is not supported for this family; only default is")
    size = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    axes = interleaved_mrope_axes(rope.get("mrope_section", [size // 2, 0, 0]))
    return rotary_table(default_inv_freq(rope["rope_theta"], size), context, axes)


def _mtp(
    ops: Ops,
    weights: Weights,
    text: dict[str, Any],
    variant: Variant,
    spec: ModelSpec,
    model: Qwen3_5,
    output: PackedLinear,
    ids: Tensor | None,
) -> MtpHead | None:
    """The head if its tensors are there: converted checkpoints keep the config and lose the tensors, or the other way
    round, so the tensors decide."""
    prefix = next((prefix for prefix in HEADS if any(weights.names(prefix))), None)
    if prefix is None:
        return None
    if text.get("mtp_num_hidden_layers") not in (None, 0, 1):
        raise ModelError(
            f"an MTP head of {text['mtp_num_hidden_layers']} layers is unknown for this family; it has one"
        )
    if text.get("mtp_use_dedicated_embeddings"):
        raise ModelError("an MTP head with dedicated embeddings is not supported for this family")
    shape, load = Shape.of(text), CentredLoader(ops, weights, prefix)
    head_spec = HeadSpec(
        family=variant.family,
        vocab_size=spec.vocab_size,
        hidden_size=shape.hidden,
        rule=IMAGE_POSITIONS,
        caches=(shape.attention_cache,),
        num_modules=1,
        position_of=POSITION_OF,
        placeholder=spec.image_token,
    )
    mlp = variant.mlp(load.at("layers.0.mlp"), text)
    return MtpHead(load, shape, head_spec, mlp, model.table, output, ids, model.output, model.rotary)
