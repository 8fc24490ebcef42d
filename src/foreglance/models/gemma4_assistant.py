"""The assistant of a Gemma-4 target: a few layers that have queries only and read the target's keys and values.

Facts and where they come from (transformers 5.24 `models/gemma4_assistant` and its candidate generator, vLLM
`v1/spec_decode/gemma4.py`, mlx-vlm `gemma4_assistant`):
- its input is cat[scaled target embedding of the token, hidden], the hidden state being the target's behind the final
  norm at first, and its own behind the final norm and `post_projection` afterwards;
- a layer reads the cache of the target's last layer of its kind that writes one, also where no target layer shares it;
- every depth has the position of the first token that has no row yet, and sees the committed rows: all of them, or
  those less than the window before that position (mlx-vlm; transformers allows two more, and a stale row);
- `use_ordered_embeddings`: only the tokens of the best few centroids are considered, row by row; the others have no
  chance (transformers gives them the batch's lowest logit minus one).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreglance.batch import TILE, Few, Holder
from foreglance.models.base import ModelError, Target, tiles_of
from foreglance.models.gemma4 import SCALE, Gemma4, Layer, LayerShape, Shape, rotary_of
from foreglance.models.layers import RotaryTable
from foreglance.models.loader import Loader
from foreglance.models.plans import NotRecordable, ReaderPlan
from foreglance.models.reading import Lent, Read, ReaderSpec
from foreglance.models.weights import INTEGERS, Weights
from foreglance.ops.base import Ops
from foreglance.ops.native import NativeOps
from foreglance.request import MAX_DEPTH

FAMILY = "gemma4_assistant"
log = logging.getLogger(__name__)


class LentView:
    """One row per sequence over the rows that its target lends; nothing is written."""

    def __init__(self, ops: Ops, positions: Tensor, rotary: dict[str, RotaryTable], lent: Sequence[Lent]):
        self.blocks = tiles_of(len(lent), TILE)
        self.angles = {kind: table.angles(ops, positions) for kind, table in rotary.items()}
        self._ops, self._lent = ops, lent

    def attend(self, layer: LayerShape, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise RuntimeError("an assistant writes no cache")

    def look(self, layer: LayerShape, query: Tensor) -> Tensor:
        rows = [self._ops.attend_row(q, *lent[layer.cache], SCALE) for q, lent in zip(query, self._lent, strict=True)]
        return torch.stack(rows)


class FewView:
    """`LentView` for a plan: `few` says which caches its rows see, and where a row of their own would lie."""

    def __init__(
        self, ops: NativeOps, positions: Tensor, rotary: dict[str, RotaryTable], few: Few, reads: Sequence[Read]
    ):
        self.blocks = tiles_of(positions.shape[1], TILE)
        self.angles = {kind: table.angles(ops, positions) for kind, table in rotary.items()}
        self._ops, self._few, self._reads = ops, few, reads

    def attend(self, layer: LayerShape, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise RuntimeError("an assistant writes no cache")

    def look(self, layer: LayerShape, query: Tensor) -> Tensor:
        read = self._reads[layer.cache]
        window = None if read.window is None else read.window - 1  # the row itself is not there
        return self._ops.attend_lent(self._few, read.place, query, layer.kv_heads, SCALE, window)


class FullHead:
    """Logits of every token."""

    def __init__(self, load: Loader, vocab_size: int, hidden: int):
        self._ops = load.ops
        self._weight = load.linear({"model.embed_tokens": vocab_size}, hidden)

    def __call__(self, state: Tensor) -> Tensor:
        return self._ops.linear(state, self._weight, tiles_of(len(state), TILE))


class OrderedHead:
    """Logits of the tokens whose centroids are the best `top_k`; the others lose, each row by itself."""

    def __init__(self, load: Loader, vocab_size: int, hidden: int, num_centroids: int, top_k: int):
        self._ops, self._vocab_size, self._top_k = load.ops, vocab_size, top_k
        masked = load.at("masked_embedding")
        self._centroids = masked.linear({"centroids": num_centroids}, hidden)
        self._table = load.tensor("model.embed_tokens.weight", vocab_size, hidden)
        self._members = masked.tensor("token_ordering", vocab_size, kinds=INTEGERS).long().view(num_centroids, -1)

    def __call__(self, state: Tensor) -> Tensor:
        scores = self._ops.linear(state, self._centroids, tiles_of(len(state), TILE))
        logits = torch.full((len(state), self._vocab_size), float("-inf"))
        for row, best in enumerate(scores.topk(self._top_k, -1).indices):
            tokens = self._members[best].flatten()
            logits[row, tokens] = self._table[tokens].float() @ state[row]
        return logits


class Gemma4Assistant:
    """A loaded assistant. Embedding and operations are the target's."""

    def __init__(self, spec: ReaderSpec, shape: Shape, load: Loader, target: Gemma4, rotary: dict[str, RotaryTable]):
        self.spec = spec
        self._ops, self._shape, self._rotary, self._embed = load.ops, shape, rotary, target.embed
        self._target_ops = target.ops
        self._plans: dict[int, ReaderPlan] = {}
        self.refused: str | None = None  # what guesses compute that no kernel does
        self._in = load.linear({"pre_projection": shape.hidden}, 2 * spec.hidden_size)
        self._out = load.linear({"post_projection": spec.hidden_size}, shape.hidden)
        self._layers = [Layer(load.at(f"model.layers.{i}"), shape, layer) for i, layer in enumerate(shape.layers)]
        self._norm = load.norm("model.norm", shape.hidden)
        self.head: FullHead | OrderedHead | None = None

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, lent: Sequence[Lent]) -> Tensor:
        return self._run(token_ids, hidden, LentView(self._ops, positions, self._rotary, lent))

    def forward_few(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, few: Few) -> Tensor:
        """`forward` for a plan, of a row per part of `few`."""
        assert isinstance(self._ops, NativeOps)
        return self._run(token_ids, hidden, FewView(self._ops, positions, self._rotary, few, self.spec.reads))

    def plan(self, num_rows: int, axes: int, holder: Holder) -> ReaderPlan | None:
        """The recorded guesses of so many sequences; None where they cannot be recorded."""
        ops, others = self._ops, self._target_ops
        if not isinstance(ops, NativeOps) or not isinstance(others, NativeOps):
            return None
        if num_rows not in self._plans and num_rows <= TILE and self.refused is None:
            try:
                plan = ReaderPlan((ops, others), self, num_rows, axes, self.spec.hidden_size, MAX_DEPTH, holder)
                self._plans[num_rows] = plan
            except NotRecordable as error:
                self.refused = str(error)
                log.info("an assistant's guesses are not recorded: they compute %s outside the kernels", error)
        return self._plans.get(num_rows)

    def _run(self, token_ids: Tensor, hidden: Tensor, view: LentView | FewView) -> Tensor:
        x = self._ops.linear(self._ops.joined(self._embed(token_ids), hidden), self._in, view.blocks)
        for layer in self._layers:
            x = layer(x, None, view)
        return self._ops.rms_norm(x, self._norm, self._shape.eps)

    def logits(self, state: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(state)

    def chained(self, state: Tensor) -> Tensor:
        return self._ops.linear(state, self._out, tiles_of(len(state), TILE))


def load(name: str, folder: Path, config: Any, target: Target) -> Gemma4Assistant:
    """Read an assistant's folder. `config` is transformers' config of it. Raises `ModelError`, in one sentence that
    names both sides, if it cannot draft for `target`."""
    values = config.to_dict()
    text, lender = values["text_config"], _lender(name, target)
    kinds = sorted(set(text["layer_types"]))
    shape = Shape.of(text, {kind: i for i, kind in enumerate(kinds)})
    _check_pair(name, values, shape, lender)
    spec = ReaderSpec(
        name=name,
        family=FAMILY,
        vocab_size=text["vocab_size"],
        hidden_size=values["backbone_hidden_size"],
        reads=tuple(Read(lender.lends[kind], _layer(shape, kind).window) for kind in kinds),
    )
    weights = Weights(folder)
    loader = Loader(lender.ops.draft, weights, "")
    rotary = {kind: rotary_of(text, shape, kind, lender.spec.context) for kind in kinds}
    model = Gemma4Assistant(spec, shape, loader, lender, rotary)
    if values.get("use_ordered_embeddings"):
        sizes = values["num_centroids"], values["centroid_intermediate_top_k"]
        model.head = OrderedHead(loader, spec.vocab_size, shape.hidden, *sizes)
    else:
        model.head = FullHead(loader, spec.vocab_size, shape.hidden)
    weights.finish(may_stay=lambda tensor: tensor == "lm_head.weight" or tensor.endswith("inv_freq"))
    return model


def _lender(name: str, target: Target) -> Gemma4:
    if not isinstance(target, Gemma4):
        raise ModelError(
            f"{name} (gemma4_assistant) has no cache of its own and reads that of a Gemma-4 target, which target "
            f"{target.spec.name} ({target.spec.family}) is not"
        )
    return target


def _layer(shape: Shape, kind: str) -> LayerShape:
    return next(layer for layer in shape.layers if layer.kind == kind)


def _check_pair(name: str, values: dict[str, Any], shape: Shape, target: Gemma4) -> None:
    text, spec = values["text_config"], target.spec
    pairs = [
        ("vocabulary", text["vocab_size"], spec.vocab_size),
        ("target's hidden size", values["backbone_hidden_size"], spec.hidden_size),
    ]
    for kind in sorted({layer.kind for layer in shape.layers}):
        if kind not in target.lends:
            raise ModelError(f"{name} reads a {kind} cache, and target {spec.name} has no layer that writes one")
        ours, theirs = _layer(shape, kind), target.shape.layers[target.lends[kind]]
        pairs += [
            (f"{kind} head size", ours.head_size, theirs.head_size),
            (f"{kind} key/value heads", ours.kv_heads, theirs.kv_heads),
            (f"{kind} window", ours.window, theirs.window),
        ]
    for word, wanted, found in pairs:
        if wanted != found:
            raise ModelError(
                f"{name} cannot draft for target {spec.name}: its {word} is {wanted}, the target's {found}"
            )
    if values.get("use_ordered_embeddings") and text["vocab_size"] % values["num_centroids"]:
        raise ModelError(f"{name}: {values['num_centroids']} centroids do not divide {text['vocab_size']} tokens")
