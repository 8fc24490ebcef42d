"""Dense text decoders in one file: Llama (Llama 3, SmolLM), Qwen3 and Gemma-3 text. Text only, one-axis positions.

Facts and where they come from (transformers 5.24 `models/llama`, `models/qwen3`, `models/gemma3`):
- one decoder with four switches (`Traits`): norms of queries and keys, norms stored as w - 1, a norm behind attention
  and MLP as well as before, an embedding that is scaled by sqrt(hidden);
- Gemma-3 scales attention by query_pre_attn_scalar ** -0.5, and its sliding and full layers have a theta of their own;
- a sliding layer's row sees itself and the window - 1 rows before;
- published tied checkpoints may hold the output head a second time, and old ones hold rotary frequencies.

Layers that read the same input are fused into one product at load: [query, key, value], [gate, up].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreglance.batch import TILE, Batch
from foreglance.cache.kv import KVSpec
from foreglance.images import Picture
from foreglance.models.attention import attend
from foreglance.models.base import Caches, ModelError, ModelSpec, tiles_of
from foreglance.models.layers import (
    FREQUENCY_FACTORS,
    RotaryTable,
    default_inv_freq,
    divided,
    embed_rows,
    rotary_table,
)
from foreglance.models.loader import Loader
from foreglance.models.plans import Plans
from foreglance.models.weights import Weights, take_output
from foreglance.ops.base import Ops, PackedLinear
from foreglance.prompt import ImageInput, OneAxis
from foreglance.request import RequestError

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_SCALINGS = ("linear", "llama3", "yarn")  # those whose frequencies do not depend on how long a text is
TRUNKS = ("model.", "language_model.model.", "")
NO_IMAGE = -1


@dataclass(frozen=True)
class Traits:
    """What tells the model types apart."""

    qk_norm: bool = False
    centred_norms: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False


TRAITS = {
    "llama": Traits(),
    "qwen3": Traits(qk_norm=True),
    "gemma3_text": Traits(qk_norm=True, centred_norms=True, sandwich_norms=True, scaled_embedding=True),
}
GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True)
class Shape:
    """Sizes and switches of a decoder, from its config. `kinds`: each layer's, `scale`: of attention."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    kinds: tuple[str, ...]
    window: int | None
    scale: float
    gate: str
    attention_bias: bool
    mlp_bias: bool
    eps: float
    traits: Traits

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        _refuse(config)
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=size,
            kinds=tuple(config.get("layer_types") or [FULL] * config["num_hidden_layers"]),
            window=config.get("sliding_window"),
            scale=config.get("query_pre_attn_scalar", size) ** -0.5,
            gate=GATES[_activation(config)],
            attention_bias=bool(config.get("attention_bias")),
            mlp_bias=bool(config.get("mlp_bias")),
            eps=config["rms_norm_eps"],
            traits=TRAITS[config["model_type"]],
        )

    def cache(self, kind: str) -> KVSpec:
        return KVSpec(self.kv_heads, self.head_size, self.window if kind == SLIDING else None)


def _activation(config: dict[str, Any]) -> str:
    return config.get("hidden_activation") or config.get("hidden_act") or "silu"


def _refuse(config: dict[str, Any]) -> None:
    """What these types may have in a config and no published causal checkpoint that is served here has."""
    if _activation(config) not in GATES:
        raise ModelError(f"activation {_activation(config)!r} is not supported; {', '.join(GATES)} are")
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise ModelError(f"{name} = {config[name]!r} is not supported for {config['model_type']}")
    odd = sorted(set(config.get("layer_types") or []) - {FULL, SLIDING})
    if odd:
        raise ModelError(f"layer type {odd[0]!r} is unknown; dense decoders have {FULL} and {SLIDING}")
    if SLIDING in (config.get("layer_types") or []) and not config.get("sliding_window"):
        raise ModelError("the config has sliding layers, but no sliding_window")


def shapes_of(config: dict[str, Any]) -> tuple[set[tuple[int, int]], set[int]]:
    """Weight shapes (out, in) and row widths of a model, for the self-test."""
    s = Shape.of(config)
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    shapes = {(q + 2 * kv, s.hidden), (s.hidden, q), (2 * s.inner, s.hidden), (s.hidden, s.inner)}
    return shapes | {(config["vocab_size"], s.hidden)}, {s.hidden, s.inner, s.head_size}


@dataclass(frozen=True)
class Linear:
    """A packed product and its bias, if it has one."""

    weight: PackedLinear
    bias: Tensor | None

    def __call__(self, ops: Ops, x: Tensor, batch: Batch) -> Tensor:
        out = ops.linear(x, self.weight, batch.blocks)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class DenseLoader(Loader):
    shape: Shape

    def norm(self, name: str, size: int) -> Tensor:
        weight = super().norm(name, size)
        return weight + 1 if self.shape.traits.centred_norms else weight

    def product(self, names: dict[str, int], num_in: int, bias: bool) -> Linear:
        """Several weights [out, in] by name and out as one, and their biases."""
        biases = [self.tensor(f"{name}.bias", out).float() for name, out in names.items()] if bias else []
        return Linear(self.linear(names, num_in), torch.cat(biases) if bias else None)


class Attention:
    """Grouped-query attention over all rows or the last `window` ones."""

    def __init__(self, load: DenseLoader, layer: int):
        s = load.shape
        self._ops, self._shape, self._layer = load.ops, s, layer
        q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        self._qkv = load.product({"q_proj": q, "k_proj": kv, "v_proj": kv}, s.hidden, s.attention_bias)
        self._out = load.product({"o_proj": s.hidden}, q, s.attention_bias)
        self._norms: Tensor | None = None  # [heads + kv heads, head size]
        if s.traits.qk_norm:
            of_query, of_key = load.norm("q_norm", s.head_size), load.norm("k_norm", s.head_size)
            self._norms = torch.stack([of_query] * s.heads + [of_key] * s.kv_heads)

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: tuple[Tensor, Tensor]) -> Tensor:
        s, n = self._shape, len(x)
        mixed = self._qkv(self._ops, x, batch).view(n, s.heads + 2 * s.kv_heads, s.head_size)
        turned, values = mixed.split([s.heads + s.kv_heads, s.kv_heads], 1)
        if self._norms is not None:
            turned = self._ops.rms_norm(turned, self._norms, s.eps)
        turned = self._ops.rotary(turned, *angles)
        query, keys = turned[:, : s.heads], turned[:, s.heads :]
        seen = attend(self._ops, batch, caches, self._layer, query, keys, values, s.scale)
        return self._out(self._ops, seen, batch)


class Mlp:
    """Gated: down(act(gate) * up)."""

    def __init__(self, load: DenseLoader):
        s = load.shape
        self._ops = load.ops
        self._gated = load.ops.gelu_mul if s.gate == "gelu" else load.ops.silu_mul
        self._gate_up = load.product({"gate_proj": s.inner, "up_proj": s.inner}, s.hidden, s.mlp_bias)
        self._down = load.product({"down_proj": s.hidden}, s.inner, s.mlp_bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self._down(self._ops, self._gated(self._gate_up(self._ops, x, batch)), batch)


class Layer:
    """Decoder layer with norms before attention and MLP, and with `sandwich_norms` also behind each."""

    def __init__(self, load: DenseLoader, layer: int):
        s = load.shape
        self.kind = s.kinds[layer]
        self._ops, self._eps = load.ops, s.eps
        self._attention, self._mlp = Attention(load.at("self_attn"), layer), Mlp(load.at("mlp"))
        self._before_attention = load.norm("input_layernorm", s.hidden)
        self._behind_attention: Tensor | None = None
        self._behind_mlp: Tensor | None = None
        if s.traits.sandwich_norms:
            self._behind_attention = load.norm("post_attention_layernorm", s.hidden)
            self._before_mlp = load.norm("pre_feedforward_layernorm", s.hidden)
            self._behind_mlp = load.norm("post_feedforward_layernorm", s.hidden)
        else:
            self._before_mlp = load.norm("post_attention_layernorm", s.hidden)

    def __call__(self, x: Tensor, batch: Batch, caches: Caches, angles: tuple[Tensor, Tensor]) -> Tensor:
        seen = self._attention(self._norm(x, self._before_attention), batch, caches, angles)
        x = self._ops.add(x, self._norm(seen, self._behind_attention))
        inner = self._mlp(self._norm(x, self._before_mlp), batch)
        return self._ops.add(x, self._norm(inner, self._behind_mlp))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._eps)


class Dense:
    """A loaded text decoder; a target without images, or an independent draft."""

    head = None

    def __init__(self, spec: ModelSpec, load: DenseLoader, rotary: dict[str, RotaryTable], tied: bool):
        shape = load.shape
        self.spec = spec
        self._ops, self._shape, self._rotary = load.ops, shape, rotary
        self._table = load.tensor("embed_tokens.weight", spec.vocab_size, shape.hidden)
        self._embedding_scale = shape.hidden**0.5 if shape.traits.scaled_embedding else None
        self._layers = [Layer(load.at(f"layers.{i}"), i) for i in range(len(shape.kinds))]
        self._norm = load.norm("norm", shape.hidden)
        head = load.prefix.removesuffix("model.") + "lm_head.weight"
        names = [head if head in load.weights else f"{load.prefix}embed_tokens.weight"]
        self._output = load.weights.packed(load.ops, names, lambda: take_output(load.weights, self._table, tied, head))
        self.plans = Plans(load.ops, self._forward)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        return self.plans(batch, caches)

    def _forward(self, batch: Batch, caches: Caches) -> Tensor:
        angles = {kind: table.angles(self._ops, batch.positions) for kind, table in self._rotary.items()}
        x = embed_rows(self._ops, self._table, batch)
        if self._embedding_scale is not None:
            x = self._ops.scaled(x, self._embedding_scale)
        for layer in self._layers:
            x = layer(x, batch, caches, angles[layer.kind])
        return self._ops.rms_norm(x, self._norm, self._shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._output, tiles_of(len(hidden), TILE))

    def prepare(self, picture: Picture) -> ImageInput:
        raise RequestError(
            f"{self.spec.name} is a text model, so it takes no images", param="image", code="images_unsupported"
        )

    def embed_image(self, image: ImageInput) -> Tensor:
        raise RuntimeError("a text model has no vision tower")


def load(
    name: str, folder: Path, config: Any, ops: Ops, context: int, eos: frozenset[int], text_only: bool = False
) -> Dense:
    """Read a checkpoint folder. `config` is transformers' config of it. There is nothing but text, so `text_only`
    changes nothing."""
    values = config.to_dict()
    shape = Shape.of(values)
    rotary = {kind: _rotary(config, kind, shape, context) for kind in set(shape.kinds)}
    weights = Weights(folder)
    trunk = next((prefix for prefix in TRUNKS if f"{prefix}embed_tokens.weight" in weights), None)
    if trunk is None:
        raise ModelError(f"{folder}: no embed_tokens.weight under model., language_model.model. or the top")
    spec = ModelSpec(
        name=name,
        family=values["model_type"],
        vocab_size=values["vocab_size"],
        hidden_size=shape.hidden,
        context=context,
        rule=OneAxis(),
        caches=tuple(shape.cache(kind) for kind in shape.kinds),
        whole_images=False,
        image_token=NO_IMAGE,
        eos=eos,
    )
    model = Dense(spec, DenseLoader(ops, weights, trunk, shape), rotary, bool(values.get("tie_word_embeddings")))
    weights.finish(may_stay=lambda tensor: tensor.endswith("rotary_emb.inv_freq"))
    return model


def _rotary(config: Any, kind: str, shape: Shape, context: int) -> RotaryTable:
    """Every kind of layer may have a theta and a scaling of its own; else all share one."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    apart = kind in config.rope_parameters
    rope = config.rope_parameters[kind] if apart else config.rope_parameters
    inv_freq, scaling = default_inv_freq(rope["rope_theta"], shape.head_size), 1.0
    if rope["rope_type"] in ROPE_SCALINGS:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind if apart else None)
    elif rope["rope_type"] != "default":
        raise ModelError(f"rope_type {rope['rope_type']!r} is not supported; default, {', '.join(ROPE_SCALINGS)} are")
    if kind == FULL:
        inv_freq = divided(inv_freq, config.to_dict().get(FREQUENCY_FACTORS))
    return rotary_table(inv_freq, context, torch.zeros(len(inv_freq), dtype=torch.int64), scaling)
