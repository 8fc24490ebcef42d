"""Logits to a pick: processors and coupled noise. Free functions; no drafts, no caches, no global random state.

    pick = argmax(processed logits + temperature * noise)

The noise is Gumbel noise from a counter-based hash of (request seed, token index, token id), so target and drafter pick
with the same noise, a guess stands when the two picks are equal, and the text for a seed does not depend on drafts,
depth or batch (drafter-invariant coupling: Daliri, Musco and Suresh, "Coupling without Communication", 2024).
Temperature 0 is the same rule with no noise: exactly greedy. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreglance.request import LogProb, SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """uint64 [n] -> uint64 [n]: the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(seed: int, index: int, token_ids: np.ndarray) -> np.ndarray:
    """float64 [n] standard Gumbel noise of token `token_ids[j]` at generated-token number `index`."""
    with np.errstate(over="ignore"):
        key = mix64(np.array([seed], np.uint64) + _GOLDEN * np.array([index + 1], np.uint64))
        bits = mix64(key + _GOLDEN * (token_ids.astype(np.uint64) + np.uint64(1)))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def pick(
    logits: np.ndarray,
    params: SamplingParams,
    index: int,
    prompt: Sequence[int],
    generated: Sequence[int],
    allowed: np.ndarray | None = None,
) -> int:
    """logits float32 [vocab] of one row -> token id.

    `index` is the number of the token that is picked (0 is the first generated one); `prompt` and `generated` are the
    history that this row really has, accepted or assumed. `allowed` int64 [m], ascending, are the ids that may be
    picked, and one of them is; top-k, top-p and min-p count among these.
    """
    scores = process(logits, params, prompt, generated)
    scores = scores if allowed is None else scores[allowed]
    if params.temperature == 0:
        best = scores.argmax()
    else:
        kept = survivors(scores / params.temperature, params)
        noise = gumbel_noise(params.seed, index, kept if allowed is None else allowed[kept])
        best = kept[(scores[kept] + params.temperature * noise).argmax()]
    return int(best if allowed is None else allowed[best])


def is_plain(params: SamplingParams) -> bool:
    """Whether temperature and noise alone decide a pick, if no grammar does."""
    return (
        not params.logit_bias
        and params.repetition_penalty == 1
        and not (params.presence_penalty or params.frequency_penalty)
        and (params.temperature == 0 or not (params.top_k or params.top_p < 1 or params.min_p))
    )


def log_prob(logits: np.ndarray, token: int, num_top: int) -> LogProb:
    """logits float32 [vocab] of one row -> log-probabilities of the model's own distribution, before anything that
    `pick` does to it, of `token` and of the `num_top` likeliest tokens (ties: the lowest id first).

    In float64 on a copy, so that equal logits give equal numbers wherever the row lay.
    """
    scores = logits.astype(np.float64)
    highest = scores.max()
    scores -= highest + np.log(np.exp(scores - highest).sum())
    return LogProb(float(scores[token]), tuple((int(i), float(scores[i])) for i in likeliest(scores, num_top)))


def likeliest(scores: np.ndarray, count: int) -> np.ndarray:
    """Ids int64 [count] of the highest scores [vocab], best first; ties: the lowest id first."""
    if not count:
        return np.empty(0, np.int64)
    count = min(count, len(scores))
    border = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= border)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def process(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Logit bias and penalties; float64 [vocab] if anything changed, else the logits themselves."""
    if not (
        params.logit_bias
        or params.repetition_penalty != 1
        or ((params.presence_penalty or params.frequency_penalty) and generated)
    ):
        return logits
    scores = logits.astype(np.float64)
    if params.repetition_penalty != 1:
        seen = np.unique(np.fromiter((*prompt, *generated), np.int64))
        seen = seen[(seen >= 0) & (seen < len(scores))]
        penalty = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if (params.presence_penalty or params.frequency_penalty) and generated:
        tokens, counts = np.unique(np.fromiter(generated, np.int64), return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def survivors(scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Ids int64 [m] that top-k, top-p and min-p leave, of logits [vocab] that are already divided by the temperature.

    Applied in that order, each on what the one before left. At least the best token survives.
    """
    if not params.top_k and params.top_p >= 1 and not params.min_p:
        return np.arange(len(scaled))
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if params.top_p < 1:
        shares = np.cumsum(weights) / weights.sum()
        count = int(np.searchsorted(shares, params.top_p)) + 1
        order, weights = order[:count], weights[:count]
    return order[weights >= params.min_p]
